# The operator's image. It must not contain torch: it starts in a second and has little to patch.
#
# Two layers are ours: the dependencies, rebuilt only when requirements/operator.txt changes, and the code.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

# Any base with apt will do: Python 3.11 or newer is installed when it is missing. Bytecode is compiled now, because
# the root file system is read-only when this runs; unchecked, because nobody edits files in an image. The secret is
# optional: the certificates of a proxy that inspects traffic, where packages come through one.
COPY requirements/bootstrap.txt requirements/operator.txt /opt/requirements/
RUN --mount=type=cache,target=/root/.cache/uv \
    --mount=type=secret,id=ca-certificates,target=/run/ca-certificates.crt \
    set -eu; \
    if ! python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
        apt-get update; \
        apt-get install -y --no-install-recommends python3 python3-venv ca-certificates; \
        rm -rf /var/lib/apt/lists/*; \
    fi; \
    if [ -s /run/ca-certificates.crt ]; then \
        export SSL_CERT_FILE=/run/ca-certificates.crt PIP_CERT=/run/ca-certificates.crt; \
    fi; \
    python3 -m venv /tmp/build; \
    /tmp/build/bin/pip install --quiet --no-cache-dir --disable-pip-version-check --require-hashes \
        --requirement /opt/requirements/bootstrap.txt; \
    python3 -m venv --without-pip /opt/venv; \
    PYC_INVALIDATION_MODE=UNCHECKED_HASH UV_LINK_MODE=copy /tmp/build/bin/uv pip install --quiet \
        --python /opt/venv/bin/python3 --require-hashes --compile-bytecode --requirement /opt/requirements/operator.txt; \
    rm -rf /tmp/build; \
    site="$(/opt/venv/bin/python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
    echo /opt/lora > "$site/lora.pth"; \
    printf '%s\n' '#!/opt/venv/bin/python3' 'from lora_operator.cli import main' 'raise SystemExit(main())' \
        > /opt/venv/bin/lora-operator; \
    chmod 0755 /opt/venv/bin/lora-operator; \
    echo 'lora:x:65532:65532:lora:/tmp:/usr/sbin/nologin' >> /etc/passwd; \
    echo 'lora:x:65532:' >> /etc/group

ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp

# Read-only, and first on the path of `python3 -m`: nothing a job writes can be imported by accident.
WORKDIR /opt/lora
ENTRYPOINT ["python3", "-m", "lora_operator"]

# From here on is what a change of our code rebuilds.
COPY pyproject.toml operator /opt/lora/
# The metadata makes importlib.metadata.version("lora-operator") work without a build backend in the image.
RUN /opt/venv/bin/python3 -c "import tomllib, pathlib; \
project = tomllib.loads(pathlib.Path('/opt/lora/pyproject.toml').read_text())['project']; \
folder = pathlib.Path('/opt/lora/lora_operator-%s.dist-info' % project['version']); \
folder.mkdir(); \
(folder / 'METADATA').write_text('Metadata-Version: 2.1\nName: %s\nVersion: %s\n' % (project['name'], project['version']))" \
    && chmod -R a+rX /opt/lora \
    && /opt/venv/bin/python3 -m compileall -q --invalidation-mode unchecked-hash /opt/lora

USER 65532:65532
