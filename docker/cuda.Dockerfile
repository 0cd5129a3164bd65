# The package with vLLM, for NVIDIA GPUs. torch brings CUDA's libraries; the host has the driver and NVIDIA's container toolkit.
#   docker build --file docker/cuda.Dockerfile --tag async-rlhf-cuda .
#   docker run --rm --gpus all --shm-size 16g --volume "$PWD/runs:/async_rlhf/runs" async-rlhf-cuda async-rlhf --help
FROM python:3.11-slim-bookworm
# vLLM compiles kernels when it starts.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ gcc git libc6-dev make && rm -rf /var/lib/apt/lists/*
WORKDIR /async_rlhf
ENV VENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY . .
# No GPU is seen while an image is built, so make setup-vllm would take the build for CPUs.
RUN make setup && pip install --constraint constraints.txt --editable '.[vllm,peft,quantized]' && touch $VENV/.vllm
# There is no nvcc here, so FlashInfer needs its kernels. vllm download-kernels runs this, but does not start without a GPU.
RUN python -m flashinfer download-kernels
CMD ["async-rlhf", "--help"]
