#!/usr/bin/env bash
# Both images without a registry and without a container engine's daemon: the base from Debian's packages, the
# rest by the Dockerfile. Needs root, buildah, mmdebstrap, and pip as this machine has set it up.
#
# In: the checkout. Out: localhost/pannier-{base,sidecar,coordinator} in the storage of build/images, and a
# container of each, named like the image, whose files the tests read. Base and wheels are kept for the next time.
set -euo pipefail
cd "$(dirname "$0")/../.."

SUITE=bookworm PYTHON=3.11
directory=$PWD/build/images
mkdir -p "$directory"
in_storage() {
	buildah --root "$directory/storage" --runroot "$directory/run" --storage-driver vfs "$@"
}

# The packages of a `python:slim` that are used here.
if [ ! -e "$directory/base.tar" ]; then
	mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates \
		"$SUITE" "$directory/base.tar.new"
	mv "$directory/base.tar.new" "$directory/base.tar"
fi
# Wheels are fetched here, by pip's own configuration; the build fetches nothing.
python3 -m pip --disable-pip-version-check download --quiet --quiet --only-binary=:all: --python-version "$PYTHON" \
	--dest "$directory/wheels" --constraint requirements.lock '.[torch,gcs,s3]' hatchling
printf '[global]\nno-index = true\nfind-links = /wheels\n' > "$directory/pip.conf"

# Storage of its own, which no other program uses.
if [ -d "$directory/storage" ]; then
	in_storage rm --all > /dev/null
	in_storage rmi --all --force > /dev/null
fi
in_storage from --quiet --name pannier-base scratch
in_storage add --quiet pannier-base "$directory/base.tar" / > /dev/null
in_storage commit --quiet pannier-base localhost/pannier-base > /dev/null
for target in sidecar coordinator; do
	# Docker's format: OCI's has no HEALTHCHECK.
	in_storage build --quiet --isolation chroot --network host --format docker --target "$target" \
		--build-arg BASE=localhost/pannier-base --volume "$directory/wheels:/wheels:ro" \
		--volume "$directory/pip.conf:/etc/pip.conf:ro" --tag "localhost/pannier-$target" . > /dev/null
	in_storage from --quiet --name "pannier-$target" "localhost/pannier-$target"
done
in_storage images
