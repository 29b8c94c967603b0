# One static binary on an empty base. Needs BuildKit (the default since Docker 23):
#   docker build -t headstart:0.1.0 .
#   docker buildx build --platform linux/amd64,linux/arm64 -t REGISTRY/headstart:TAG --push .
#
# The build stage leaves two files, /out/headstart-$TARGETARCH (amd64, arm64) and its SBOM. A folder with out/… of your own
# static builds can stand in for it, and then no compiler runs; .ci/image does that, without Docker:
#   docker build --build-context build=FOLDER -t headstart:0.1.0 .

# Alpine's Rust is a musl host, so each platform builds for itself (emulated where it must be) without a cross C compiler,
# which ring and mimalloc would need.
ARG RUST_VERSION=1.89
FROM rust:${RUST_VERSION}-alpine AS build
RUN apk add --no-cache bash jq
ARG TARGETARCH
WORKDIR /src
COPY Cargo.toml Cargo.lock ./
COPY .cargo .cargo
COPY src src
# What the manifest names must be there, and the workspace's members for --locked to agree; nothing of them is built.
COPY benches benches
COPY tests tests
RUN --mount=type=cache,id=headstart-registry,target=/usr/local/cargo/registry,sharing=locked \
    --mount=type=cache,id=headstart-target-$TARGETARCH,target=/src/target,sharing=locked \
    case "$TARGETARCH" in \
      amd64) target=x86_64-unknown-linux-musl ;; \
      arm64) target=aarch64-unknown-linux-musl ;; \
      *) echo "no build for $TARGETARCH" >&2; exit 1 ;; \
    esac && \
    cargo build --locked --release --target "$target" --bin headstart && \
    install -D "target/$target/release/headstart" "/out/headstart-$TARGETARCH"
COPY .ci/image .ci/image
RUN --mount=type=cache,id=headstart-registry,target=/usr/local/cargo/registry,sharing=locked \
    .ci/image sbom "$TARGETARCH" > "/out/headstart-$TARGETARCH.cdx.json"

FROM scratch
ARG TARGETARCH
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title="headstart" \
      org.opencontainers.image.description="Gives Kubernetes pods more CPU while they start, and takes it back in place" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
COPY LICENSE /usr/share/doc/headstart/
# For scanners: an empty base has no package list, and what is linked into the binary is this.
COPY --from=build /out/headstart-$TARGETARCH.cdx.json /usr/share/doc/headstart/headstart.cdx.json
COPY --from=build --chmod=0555 /out/headstart-$TARGETARCH /headstart
# By number, so that runAsNonRoot can check it: there is no /etc/passwd.
USER 65532:65532
ENTRYPOINT ["/headstart"]
