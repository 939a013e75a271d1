#!/usr/bin/env bash
# Speed and memory of the trainer on one GPU, in under five minutes: FLUX.2-Klein-4B and Z-Image shaped denoisers with
# random weights at 1024 px, LoRA of rank 32, bf16. Without a GPU it runs the same code on tiny shapes, to show that it works.
#
#   benchmarks/gpu.sh [--shapes klein-4b z-image] [--steps 8] [--out figures.json]
#
# Takes the Python of .venv where there is one (`make .venv/.ready`), else $PYTHON or python3 with torch, diffusers and peft.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
export PYTHONPATH=operator:trainer_image HF_HUB_OFFLINE=1
exec "$python" benchmarks/gpu.py "$@"
