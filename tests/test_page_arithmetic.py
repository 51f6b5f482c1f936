"""Tokens become pages, and pages tokens, in two modules only: read from the source itself.

Wherever else a page's size is divided by or multiplied with, need could be computed in a
second way, and the two would drift apart. Tests are not read: they count in their own way,
so that they can disagree.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "cli", "clients", "engine", "ipc", "kvcache", "scheduler", "src")

HOME = frozenset({"kvcache/layout.py", "kvcache/demand.py"})
ALLOWED: Mapping[str, str] = {
    "engine/attention_plan.py": "turns arrays of positions into page ids and slots of tensors",
    "engine/checkpoint/fp8.py": "rounds a matrix up to whole scales, and knows no pages",
    "engine/checkpoint/gguf_reader.py": "rounds a file's offset up, and knows no pages",
    "kvcache/geometry.py": "rounds bytes up, where groups follow one another in a buffer",
}

SIZE_NAMES = ("page_tokens", "page_size", "tokens_per_page", "page_len")
SCALING = (ast.Mult, ast.FloorDiv, ast.Mod, ast.Div)
SCALING_CALLS = frozenset(
    {"divmod", "ceil", "floordiv", "floor_divide", "mod", "remainder", "mul", "multiply"}
)
TRANSPARENT_CALLS = frozenset({"int", "float", "Tokens", "Pages", "int64", "abs", "max", "min"})


class Finding(NamedTuple):
    line: int
    source: str


def find(source: str) -> list[Finding]:
    """Every place of a module that scales by a page's size, or divides rounding up."""
    tree = ast.parse(source)
    aliases = _aliases(tree)
    lines = {
        node.lineno: ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.expr | ast.AugAssign) and _is_arithmetic(node, aliases)
    }
    return [Finding(line, text) for line, text in sorted(lines.items())]


def _is_arithmetic(node: ast.expr | ast.AugAssign, aliases: frozenset[str]) -> bool:
    match node:
        case ast.BinOp(left=ast.Constant(value=str()) | ast.JoinedStr()):
            return False  # The percent sign of a text.
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, SCALING):
            names_size = _is_size(left, aliases) or _is_size(right, aliases)
            return names_size or _rounds_up(left, op, right)
        case ast.AugAssign(op=op, value=value) if isinstance(op, SCALING):
            return _is_size(value, aliases)
        case ast.Call(args=arguments) if _called(node) in SCALING_CALLS:
            is_quotient = any(
                isinstance(each, ast.BinOp)
                and isinstance(each.op, ast.Div)
                and not isinstance(each.right, ast.Constant)
                for each in arguments
            )
            has_size = any(_is_size(each, aliases) for each in arguments)
            return has_size or (_called(node) == "ceil" and is_quotient)
        case _:
            return False


def _rounds_up(left: ast.expr, op: ast.operator, right: ast.expr) -> bool:
    """-a // b, which is negated again for ⌈a / b⌉, or (a + b - 1) // b, by whatever names.

    A divisor that is written as a number converts a unit.
    """
    if not isinstance(op, ast.FloorDiv) or isinstance(right, ast.Constant):
        return False
    match left:
        case ast.BinOp(op=ast.Sub(), left=total, right=ast.Constant(value=1)):
            return any(ast.dump(node) == ast.dump(right) for node in ast.walk(total))
        case _:
            while isinstance(left, ast.BinOp):
                left = left.left
            return isinstance(left, ast.UnaryOp) and isinstance(left.op, ast.USub)


def _is_size(node: ast.expr, aliases: frozenset[str]) -> bool:
    """Is the value a page's size in tokens, or a sum with one?"""
    match node:
        case ast.Name(id=name):
            return name in aliases or _names_size(name)
        case ast.Attribute(attr=name):
            return _names_size(name)
        case ast.Call(args=arguments) if _called(node) in TRANSPARENT_CALLS:
            return any(_is_size(each, aliases) for each in arguments)
        case ast.BinOp(left=left, right=right):
            return _is_size(left, aliases) or _is_size(right, aliases)
        case (
            ast.UnaryOp(operand=value) | ast.NamedExpr(value=value) | ast.Subscript(value=value)
        ):
            return _is_size(value, aliases)
        case _:
            return False


def _aliases(tree: ast.Module) -> frozenset[str]:
    """Names that hold a page's size somewhere in the module."""
    found: frozenset[str] = frozenset()
    while True:
        more = found | {
            name.id
            for name, value in _assignments(tree)
            if isinstance(name, ast.Name)
            and not isinstance(value, ast.BinOp)
            and _is_size(value, found)
        }
        if more == found:
            return found
        found = more


def _assignments(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from _pairs(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield target, value
            case ast.NamedExpr(target=target, value=value):
                yield target, value
            case _:
                pass


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        yield from zip(target.elts, value.elts, strict=False)
    else:
        yield target, value


def _called(node: ast.expr) -> str:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name
        case _:
            return ""


def _names_size(name: str) -> bool:
    return any(part in name.lower() for part in SIZE_NAMES)


def findings_by_file() -> dict[str, list[Finding]]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {
        str(path.relative_to(ROOT)): find(path.read_text(encoding="utf-8")) for path in paths
    }
    return {path: lines for path, lines in found.items() if lines}


FOUND = findings_by_file()


def test_page_arithmetic_is_in_the_layout_and_in_demand_only() -> None:
    wrong = [
        f"{path}, line {one.line}: {one.source}"
        for path, lines in FOUND.items()
        if path not in HOME and path not in ALLOWED
        for one in lines
    ]
    assert not wrong


def test_nothing_is_allowed_that_need_not_be() -> None:
    assert {"kvcache/layout.py", *ALLOWED} <= FOUND.keys()


@pytest.mark.parametrize(
    "line",
    [
        "pages = tokens // group.page_tokens",
        "slot = position % self.page_tokens",
        "pages = -(-tokens // page_size)",
        "end = count * layout.groups[0].page_tokens",
        "end = PAGE_TOKENS * count",
        "end = int(page_tokens) * (count + 1)",
        "pages = (tokens + group.page_tokens - 1) // group.page_tokens",
        "pages = tokens / page_tokens",
        "end *= page_tokens",
        "page, slot = divmod(position, group.page_tokens)",
        "pages = math.ceil(tokens / page_tokens)",
        "pages = np.floor_divide(positions, self.page_size)",
        "size = group.page_tokens\npages = tokens // size",
        "size, other = int(group.page_tokens), 1\nsame = size\nslot = position % same",
        "size: int = page_tokens\nend = size * 2",
        "if (size := page_tokens):\n    end = 3 * size",
        # Rounding up is what counting pages looks like, whatever the names.
        "pages = -(-tokens // p)",
        "pages = -(-a * b // c)",
        "pages = (tokens + p - 1) // p",
        "pages = math.ceil(tokens / p)",
        "text = f'{count * pool.page_tokens:,}'",
        "for group in groups:\n    yield [n // group.page_tokens for n in range(9)]",
        "def f(n: int, tokens_per_page: int) -> int:\n    return n // tokens_per_page",
    ],
)
def test_planted_page_arithmetic_is_found(line: str) -> None:
    assert find(line)


@pytest.mark.parametrize(
    "line",
    [
        "pages = group.pages(tokens)",
        "end = group.start_of(count)",
        "text = 'pages of %d tokens' % page_tokens",
        "size = group.page_bytes * count",
        "half = (low + high) // 2",
        "if tokens < page_tokens:\n    fail(page_tokens)",
        "layout = layout_for(config, page_tokens, dtype)",
        "last = (tokens - 1) // p",
        "share = used * len(groups)",
        "seconds = math.ceil(milliseconds / 1000)",
    ],
)
def test_other_arithmetic_is_left_alone(line: str) -> None:
    assert not find(line)


def test_a_finding_tells_the_line_and_the_expression() -> None:
    source = "a = 1\n\nb = a // page_tokens\n"
    assert find(source) == [Finding(3, "a // page_tokens")]
