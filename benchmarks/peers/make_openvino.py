"""llama.cpp's float16 file as OpenVINO's model in 4 bits: `python make_openvino.py FOLDER`.

Runs in OpenVINO's environment (openvino-genai, nncf). OpenVINO GenAI's own GGUF reader makes the
graph; nncf compresses the weights by the recipe of OpenVINO's documentation (symmetric, groups of
128, the head in 8 bits).
"""

from __future__ import annotations

import sys
from pathlib import Path

import nncf
import openvino
import openvino_genai as genai


def main() -> None:
    folder = Path(sys.argv[1])
    target = folder / "openvino"
    if (target / "done").exists():
        return
    target.mkdir(exist_ok=True)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    source = folder / "f16.gguf"
    genai.ContinuousBatchingPipeline(str(source), scheduler, "CPU", {"enable_save_ov_model": True})
    model = openvino.Core().read_model(folder / "openvino_model.xml")
    mode = nncf.CompressWeightsMode.INT4_SYM
    model = nncf.compress_weights(model, mode=mode, group_size=128, ratio=1.0)
    openvino.save_model(model, target / "openvino_model.xml", compress_to_fp16=False)
    (target / "config.json").write_text((folder / "hf/config.json").read_text())
    (target / "generation_config.json").write_text("{}")
    (target / "done").touch()


if __name__ == "__main__":
    main()
