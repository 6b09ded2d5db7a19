# docker build -t kvasir .
# docker run -p 8080:8080 -v /path/to/models:/models:ro kvasir --model /models/FILE.gguf
FROM debian:12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev meson ninja-build pkg-config python3 \
	libuv1-dev libmicrohttpd-dev libwebsockets-dev libjansson-dev libutf8proc-dev liburing-dev
COPY . /src
RUN meson setup --buildtype=release --prefix=/usr -Dtests=disabled -Dcuda=disabled /build /src && ninja -C /build

FROM debian:12-slim
RUN apt-get update && apt-get install -y --no-install-recommends \
	libuv1 libmicrohttpd12 libwebsockets17 libwebsockets-evlib-uv libjansson4 libutf8proc2 liburing2 && rm -rf /var/lib/apt/lists/*
COPY --from=build /build/server/kvasir /usr/bin/kvasir
RUN useradd --system --no-create-home kvasir
USER kvasir
ENV KVASIR_HOST=0.0.0.0
EXPOSE 8080
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvasir", "serve"]
