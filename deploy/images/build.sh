#!/usr/bin/env bash
# Both images without a registry and without a container engine's daemon: the base from Debian's packages, the
# rest by the Dockerfile. Needs root, buildah, mmdebstrap, and pip as this machine has set it up.
#
# Usage: build.sh [ARCHITECTURE [IMAGE...]]. An architecture other than this machine's also needs qemu-user-static,
# arch-test, binfmt_misc and, for the coordinator, an index of torch's CPU builds for it (PIP_EXTRA_INDEX_URL).
#
# In: the checkout. Out: localhost/pannier-{base,sidecar,coordinator} in the storage of build/images (of another
# architecture: build/images-arm64), and a container of each, named like the image, whose files the tests read. Base
# and wheels are kept for the next time.
set -euo pipefail
cd "$(dirname "$0")/../.."

SUITE=bookworm PYTHON=3.11
native=$(dpkg --print-architecture)
architecture=${1:-$native}
case $architecture in
amd64) machine=x86_64 ;;
arm64) machine=aarch64 ;;
*) echo "usage: $0 [amd64|arm64 [sidecar|coordinator]...]" >&2 && exit 2 ;;
esac
targets=("${@:2}")
[ ${#targets[@]} -gt 0 ] || targets=(sidecar coordinator)
extras=gcs,s3
[[ " ${targets[*]} " != *" coordinator "* ]] || extras=torch,$extras
directory=$PWD/build/images
[ "$architecture" = "$native" ] || directory+=-$architecture
mkdir -p "$directory"
in_storage() {
	buildah --root "$directory/storage" --runroot "$directory/run" --storage-driver vfs "$@"
}

# The packages of a `python:slim` that are used here.
if [ ! -e "$directory/base.tar" ]; then
	mmdebstrap --quiet --variant=minbase --architectures="$architecture" --include=python3,python3-venv,python3-pip,ca-certificates \
		"$SUITE" "$directory/base.tar.new"
	mv "$directory/base.tar.new" "$directory/base.tar"
fi
# Wheels are fetched here, by pip's own configuration; the build fetches nothing.
platforms=()
for libc in manylinux_2_28 manylinux_2_17 manylinux2014 linux; do platforms+=(--platform "${libc}_$machine"); done
python3 -m pip --disable-pip-version-check download --quiet --quiet --only-binary=:all: --python-version "$PYTHON" \
	"${platforms[@]}" --dest "$directory/wheels" --constraint requirements.lock ".[$extras]" hatchling
printf '[global]\nno-index = true\nfind-links = /wheels\n' > "$directory/pip.conf"

# Storage of its own, which no other program uses.
if [ -d "$directory/storage" ]; then
	in_storage rm --all > /dev/null
	in_storage rmi --all --force > /dev/null
fi
in_storage from --quiet --arch "$architecture" --name pannier-base scratch
in_storage add --quiet pannier-base "$directory/base.tar" / > /dev/null
in_storage commit --quiet pannier-base localhost/pannier-base > /dev/null
for target in "${targets[@]}"; do
	# Docker's format: OCI's has no HEALTHCHECK.
	in_storage build --quiet --arch "$architecture" --isolation chroot --network host --format docker --target "$target" \
		--build-arg BASE=localhost/pannier-base --build-arg REVISION="$(git describe --always --dirty)" --volume "$directory/wheels:/wheels:ro" \
		--volume "$directory/pip.conf:/etc/pip.conf:ro" --tag "localhost/pannier-$target" . > /dev/null
	in_storage from --quiet --arch "$architecture" --name "pannier-$target" "localhost/pannier-$target"
done
in_storage images
