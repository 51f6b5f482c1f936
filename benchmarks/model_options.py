"""Options of benchmarks that serve a model. Importing this loads no torch."""

import argparse


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=1, help="of each worker and the loop")
