"""The scheduler: a pure decision core and the trio shell around it."""
