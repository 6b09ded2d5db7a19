# docker build -t kvasir .
# docker run --read-only --cap-drop ALL -p 8080:8080 -v /path/to/models:/models:ro kvasir --model /models/FILE.gguf
#
# What is built stays in its stage; the last stage, which a plain `docker build` makes, has the program and the libraries it
# loads, nothing that compiles or downloads. The daemon writes nothing, so its root can be read-only.
#
# For NVIDIA GPUs (the host needs a driver for CUDA 13 and NVIDIA's container toolkit):
#
# docker build -t kvasir-cuda --target cuda .
# docker run --gpus all -p 8080:8080 -v /path/to/models:/models:ro kvasir-cuda --model /models/FILE.gguf --device cuda
ARG CUDA_VERSION=13.0.1

FROM nvidia/cuda:${CUDA_VERSION}-devel-ubuntu24.04 AS build-cuda
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libc6-dev meson ninja-build pkg-config python3 \
	libuv1-dev libmicrohttpd-dev libwebsockets-dev libssl-dev libjansson-dev libutf8proc-dev liburing-dev
COPY . /src
RUN meson setup --buildtype=release -Dtests=disabled -Dcuda=enabled /build /src && ninja -C /build server/kvasir && strip /build/server/kvasir

# The CUDA runtime is linked into the program; the driver comes from the host.
FROM nvidia/cuda:${CUDA_VERSION}-base-ubuntu24.04 AS cuda
RUN apt-get update && apt-get install -y --no-install-recommends \
	libuv1t64 libmicrohttpd12t64 libwebsockets19t64 libssl3t64 libwebsockets-evlib-uv libjansson4 libutf8proc3 liburing2 \
	&& rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log
COPY --from=build-cuda /build/server/kvasir /usr/bin/kvasir
USER 65532:65532
ENV KVASIR_HOST=0.0.0.0
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --retries=3 --start-period=600s CMD ["kvasir", "health"]
ENTRYPOINT ["kvasir", "serve"]

FROM debian:12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev meson ninja-build pkg-config python3 \
	libuv1-dev libmicrohttpd-dev libwebsockets-dev libssl-dev libjansson-dev libutf8proc-dev liburing-dev libhiredis-dev libcurl4-openssl-dev
COPY . /src
RUN meson setup --buildtype=release -Dtests=disabled -Dcuda=disabled /build /src && ninja -C /build server/kvasir && strip /build/server/kvasir

FROM debian:12-slim AS cpu
RUN apt-get update && apt-get install -y --no-install-recommends \
	libuv1 libmicrohttpd12 libwebsockets17 libssl3 libwebsockets-evlib-uv libjansson4 libutf8proc2 liburing2 libhiredis0.14 libcurl4 \
	&& rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log
COPY --from=build /build/server/kvasir /usr/bin/kvasir
# By number, so that an orchestrator can tell that it is not root.
USER 65532:65532
ENV KVASIR_HOST=0.0.0.0
EXPOSE 8080
STOPSIGNAL SIGTERM
# A large model takes its time; until it is loaded the container is "starting", not "unhealthy".
HEALTHCHECK --interval=5s --timeout=3s --retries=3 --start-period=600s CMD ["kvasir", "health"]
ENTRYPOINT ["kvasir", "serve"]
