"""What a running server says about its model besides the model's files."""

from __future__ import annotations

from pathlib import Path

from kvstore_sglang.running_server import file_digest, text_config

FIELDS = {"model_type": "llama", "num_key_value_heads": 4, "rope_theta": 1e4}


def test_overrides_and_length_are_part_of_the_text_config() -> None:
    plain = text_config(FIELDS, "{}", None)
    assert plain == text_config(FIELDS, "", None) == text_config(FIELDS | {"torch_dtype": "float16"}, "{}", None)
    longer = text_config(FIELDS, "{}", 131_072)
    scaled = text_config(FIELDS, '{"rope_scaling": {"factor": 8}}', None)
    assert len({plain, longer, scaled, text_config(FIELDS | {"rope_theta": 1e6}, "{}", None)}) == 4


def test_a_file_of_scales_is_known_by_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    assert file_digest(str(file)) is None
    file.write_text("{}")
    first = file_digest(str(file))
    file.write_text('{"k": 2}')
    assert first not in (None, file_digest(str(file)))
