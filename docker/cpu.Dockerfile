# The package with all that its tests need, on CPUs.
#   docker build --file docker/cpu.Dockerfile --tag async-rlhf .
#   docker run --rm --shm-size 2g --volume "$PWD/runs:/async_rlhf/runs" async-rlhf async-rlhf quickstart --out runs/quickstart
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install --yes --no-install-recommends gcc git libc6-dev make && rm -rf /var/lib/apt/lists/*
WORKDIR /async_rlhf
ENV VENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
COPY . .
RUN make setup
CMD ["async-rlhf", "--help"]
