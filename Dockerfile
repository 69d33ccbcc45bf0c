# hearth in a container: one program, and the libraries of NVIDIA's that it opens. docs/containers.md has the run lines.
#
#   docker build -t hearth .                                  with CUDA 13.0, for NVIDIA GPUs and DGX Spark
#   docker build -t hearth:cpu --build-arg VARIANT=cpu .      without
#
# PROGRAM is the stage or the image that has the program as /hearth: another one saves the build.
ARG BUILDER=rust:1-bookworm
ARG PROGRAM=build
ARG VARIANT=cuda
ARG CPU_BASE=debian:bookworm-slim
# The base alone: cuBLASLt, NVRTC and cuDNN are opened at run time, nothing else of the toolkit is.
ARG CUDA_BASE=nvidia/cuda:13.0.2-base-ubuntu24.04

FROM ${BUILDER} AS build
WORKDIR /source
COPY . .
RUN cargo build --release --locked && cp target/release/hearth /hearth

FROM ${PROGRAM} AS program

FROM ${CPU_BASE} AS base-cpu

FROM ${CUDA_BASE} AS base-cuda
ARG CUDA_PACKAGES="libcublas-13-0 cuda-nvrtc-13-0 libcudnn9-cuda-13"
RUN if [ -n "${CUDA_PACKAGES}" ]; then apt-get update \
    && apt-get install -y --no-install-recommends ${CUDA_PACKAGES} && rm -rf /var/lib/apt/lists/*; fi

FROM base-${VARIANT}
COPY --from=program /hearth /usr/local/bin/hearth
RUN mkdir -p /data /models /cache && chown 1000:1000 /data /models /cache
ENV HOME=/data XDG_CACHE_HOME=/cache HF_HOME=/models
WORKDIR /data
VOLUME ["/data", "/models", "/cache"]
USER 1000:1000
# As Ctrl-C: a run saves a checkpoint and ends.
STOPSIGNAL SIGINT
HEALTHCHECK --interval=60s --timeout=20s CMD ["hearth", "doctor", "--strict"]
ENTRYPOINT ["hearth"]
CMD ["doctor"]
