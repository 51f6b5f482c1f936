"""Page bookkeeping with integers, and the page store that holds the tensors."""
