"""The model card of each kind of checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from oracle.make_tiny_checkpoint import CHAT_TEMPLATE, TinyFamily, make_tiny_checkpoint
from oracle.make_tiny_gguf import make_tiny_gguf
from tidegate.engine.checkpoint.card import build_card
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.registry import open_checkpoint
from tidegate.ipc.protocol import FRAME_BYTES_MAX, ModelCard


def card_of(path: Path) -> ModelCard:
    return build_card(open_checkpoint(str(path)))


def edit_tokenizer_config(folder: Path, **fields: object) -> None:
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text()) | fields
    content = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(content))


def test_the_card_of_gemma_has_no_chat_template_and_begins_prompts_with_bos() -> None:
    card = build_card(open_checkpoint("gemma3-270m"))
    assert (card.name, card.family) == ("gemma3-270m", "gemma3")
    assert (card.vocab_size, card.context) == (262_144, 32_768)
    assert card.chat_template is None
    assert (card.bos_id, card.add_bos, card.eos_ids) == (2, True, (1,))
    assert len(card.tokenizer_json) < FRAME_BYTES_MAX
    assert Tokenizer.from_buffer(card.tokenizer_json).id_to_token(2) == "<bos>"


def test_the_card_of_smollm_has_its_chat_template_and_no_bos() -> None:
    card = build_card(open_checkpoint("smollm2-135m"))
    assert (card.name, card.family) == ("smollm2-135m", "llama")
    assert card.chat_template is not None
    assert "<|im_start|>" in card.chat_template
    assert (card.add_bos, card.eos_ids) == (False, (2, 0))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_card_of_a_folder_is_what_its_files_say(tmp_path: Path, family: TinyFamily) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", family)
    card = card_of(folder)
    assert card == ModelCard(
        name="tiny",
        family=family,
        vocab_size=384,
        context=4096,
        tokenizer_json=(folder / "tokenizer.json").read_bytes(),
        chat_template=CHAT_TEMPLATE[family],
        bos_id=2 if family == "gemma3" else None,
        add_bos=family == "gemma3",
        eos_ids=(1,) if family == "gemma3" else (2,),
    )


def test_a_folder_that_does_not_say_so_adds_bos_if_its_tokenizer_does(tmp_path: Path) -> None:
    gemma = make_tiny_checkpoint(tmp_path / "gemma", "gemma3")
    llama = make_tiny_checkpoint(tmp_path / "llama", "llama", bos_token_id=1)
    for folder, expected in ((gemma, True), (llama, False)):
        edit_tokenizer_config(folder, add_bos_token=None)
        assert card_of(folder).add_bos is expected
    edit_tokenizer_config(gemma, add_bos_token=False)
    assert card_of(gemma).add_bos is False
    (gemma / "tokenizer_config.json").unlink()
    assert card_of(gemma).add_bos is True


def test_a_chat_template_may_be_in_any_of_its_places(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    edit_tokenizer_config(folder, chat_template=named)
    assert card_of(folder).chat_template == "D"
    edit_tokenizer_config(folder, chat_template=named[:1])
    assert card_of(folder).chat_template is None
    (folder / "chat_template.jinja").write_text("J")
    assert card_of(folder).chat_template == "J"
    (folder / "chat_template.jinja").unlink()
    edit_tokenizer_config(folder, chat_template=None)
    assert card_of(folder).chat_template is None


def test_a_prompt_that_is_to_begin_with_a_token_nobody_names_is_refused(
    tmp_path: Path,
) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    edit_tokenizer_config(folder, add_bos_token=True)
    with pytest.raises(CheckpointError, match="begin-of-sequence token, but none is named"):
        card_of(folder)


def test_a_gguf_file_that_does_not_say_adds_bos_as_its_kind_of_tokenizer_does(
    tmp_path: Path,
) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "llama", bos_token_id=1)
    for pre, expected in (("gpt-2", False), ("llama-bpe", True)):
        fields: dict[str, int | float | bool | str | None] = {
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.add_bos_token": None,
        }
        path = make_tiny_gguf(tmp_path / "tiny.gguf", folder, fields=fields)
        assert card_of(path).add_bos is expected


def test_a_folder_without_a_tokenizer_or_with_a_broken_one_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    edit_tokenizer_config(folder, add_bos_token=None)
    (folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: "):
        card_of(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read: No such"):
        card_of(folder)


def test_making_a_card_loads_no_torch(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "gemma3")
    path = make_tiny_gguf(tmp_path / "tiny.gguf", folder)
    program = (
        "import sys\n"
        "from tidegate.engine.checkpoint.card import build_card\n"
        "from tidegate.engine.checkpoint.registry import open_checkpoint\n"
        "for model in sys.argv[1:]:\n"
        "    checkpoint = open_checkpoint(model)\n"
        "    print(build_card(checkpoint).family, checkpoint.fingerprint[:4])\n"
        "assert not {'torch', 'transformers', 'trio'} & sys.modules.keys()\n"
    )
    command = [sys.executable, "-c", program, str(folder), str(path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output.count("gemma3 ") == 2
