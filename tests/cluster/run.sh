#!/usr/bin/env bash
# Follows deploy/README.md on the cluster that KUBECONFIG names, and checks what it promises: a job of two hosts
# in a namespace of its own, which is removed at the end, whatever happened.
#
#   make test-cluster ROOT=gs://bucket/prefix SIDECAR=REGISTRY/pannier-sidecar:TAG COORDINATOR=REGISTRY/pannier-coordinator:TAG
#
#   ROOT          where the job saves; pods reach it as their service account, or by STORAGE_ENV
#   SIDECAR       the image of the sidecars
#   COORDINATOR   the image of the coordinator; it has torch, so it is the trainers' image, too, unless
#   TRAINER       names another one with `torchrun` and Pannier
#   OVERLAY       of deploy/overlays: indexed-job (the default), gke-gpu, leaderworkerset
#   STORAGE_ENV   a file of NAME=value, as AWS_ACCESS_KEY_ID, for the environment of daemons and trainers
#   STORAGE_PORT  of the storage, where it isn't 443
#   WITHIN        seconds that each check may take: 300
#
# It needs kubectl 1.31, grpcurl, and openssl where the cluster has no cert-manager; and for the cluster 3 cores, 4 GiB,
# and a network plugin that enforces NetworkPolicies.
set -euo pipefail
cd "$(dirname "$0")/../.."

usage() {
	sed -n '/^#   make/,/^$/s/^# \{0,1\}//p' "$0" | sed '/^set /,$d' >&2
	exit 2
}
[[ -n ${ROOT:-} && -n ${SIDECAR:-} && -n ${COORDINATOR:-} ]] || usage
TRAINER=${TRAINER:-$COORDINATOR}
OVERLAY=${OVERLAY:-indexed-job}
STORAGE_ENV=${STORAGE_ENV:-/dev/null}
STORAGE_PORT=${STORAGE_PORT:-443}
WITHIN=${WITHIN:-300}

namespace=pannier-test-$(date +%s)-$$
root=${ROOT%/}/$namespace
work=$(mktemp -d)
overlay=$work/deploy/overlays/$OVERLAY
forward=
made=
is_trainer=app.kubernetes.io/component=trainer
is_coordinator=app.kubernetes.io/component=coordinator

k() { kubectl --namespace "$namespace" "$@"; }

fail() {
	echo "FAILED: $*" >&2
	exit 1
}

passed() { printf 'ok %5d s  %s\n' "$SECONDS" "$*"; }

# await WHAT COMMAND...: returns when the command has succeeded.
await() {
	local what=$1 attempts=$((WITHIN / 2))
	shift
	until "$@"; do
		((attempts-- > 0)) || fail "$what: not within $WITHIN s"
		sleep 2
	done
}

show_pods() {
	local pod
	k get pods,events --output wide || true
	for pod in $(k get pods --output name); do
		echo "--- $pod"
		k logs "$pod" --all-containers --prefix --tail=60 || true
		k logs "$pod" --all-containers --prefix --tail=30 --previous 2>/dev/null || true
	done
}

finish() {
	local code=$?
	trap - EXIT INT TERM
	set +e
	[[ -z $forward ]] || kill "$forward" 2>/dev/null
	if [[ -n $made ]]; then
		if ((code)); then
			echo "the test ends with exit status $code; the pods:" >&2
			show_pods >&2
		fi
		kubectl delete namespace "$namespace" --timeout=600s ||
			echo "the namespace $namespace may still be there: kubectl delete namespace $namespace" >&2
		echo "what the job saved may still be there: $root"
	fi
	rm -rf "$work"
	exit "$code"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# What it needs, before anything is made.
for program in kubectl grpcurl openssl; do
	command -v "$program" >/dev/null || fail "there is no $program"
done
[[ -f deploy/overlays/$OVERLAY/kustomization.yaml ]] || fail "there is no overlay deploy/overlays/$OVERLAY"
[[ -r $STORAGE_ENV ]] || fail "STORAGE_ENV=$STORAGE_ENV can't be read"
kubectl version >/dev/null || fail "no cluster answers: which one is meant is in KUBECONFIG"

# An overlay of one's own, as the README has it: settings, images, and what else train.py needs.
cp -r deploy "$work/deploy"
cp -r tests/cluster/component "$work/deploy/components/test"
cat "$STORAGE_ENV" >"$work/deploy/components/test/storage.env"
sed -i "s/STORAGE_PORT/$STORAGE_PORT/" "$work/deploy/components/test/kustomization.yaml"

# setting NAME VALUE
setting() { sed -i "s|^$1=.*|$1=$2|" "$overlay/settings.env"; }
setting HOSTS 2
setting PANNIER_JOB "$namespace"
setting PANNIER_ALLOW "$root"
setting SPOOL_SIZE 512Mi
setting SIDECAR_MEMORY 1280Mi
setting PANNIER_GRACE 60
setting TERMINATION_GRACE 130
setting TRAINER_CPU 250m
setting TRAINER_MEMORY 1Gi
setting RESTARTS 40
echo PANNIER_KEEP_NEWEST=2 >>"$overlay/settings.env"

# image NAME IMAGE
image() {
	local name=${2%:*} tag=${2##*:}
	[[ $2 == *:* && $tag != */* && $2 != *@* ]] || fail "the image $2 has no tag"
	sed -i "s|{name: $1, .*}|{name: $1, newName: $name, newTag: \"$tag\"}|" "$overlay/kustomization.yaml"
}
image pannier-sidecar "$SIDECAR"
image pannier-coordinator "$COORDINATOR"
image trainer "$TRAINER"
sed -i -e "s/^namespace: .*/namespace: $namespace/" -e 's|^components:|&\n  - ../../components/test|' "$overlay/kustomization.yaml"

kubectl create namespace "$namespace" >/dev/null
made=yes

# issue NAME: the Secret of a daemon, as without cert-manager.
issue() {
	local name=pannier-$1 at=$work/$1
	mkdir "$at"
	openssl req -newkey rsa:2048 -nodes -subj "/CN=$name" -keyout "$at/tls.key" -out "$at/csr" 2>/dev/null
	printf 'subjectAltName=DNS:%s\nextendedKeyUsage=serverAuth,clientAuth\n' "$name" >"$at/extensions"
	openssl x509 -req -in "$at/csr" -days 2 -CA "$work/ca.crt" -CAkey "$work/ca.key" -CAcreateserial \
		-extfile "$at/extensions" -out "$at/tls.crt" 2>/dev/null
	k create secret generic "$name-tls" "--from-file=$at/tls.crt" "--from-file=$at/tls.key" "--from-file=$work/ca.crt" >/dev/null
}
if ! kubectl get crd certificates.cert-manager.io >/dev/null 2>&1; then
	echo "without cert-manager: certificates are made by openssl"
	sed -i '\|- ../../components/cert-manager$|d' "$overlay/kustomization.yaml"
	openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=pannier-ca -keyout "$work/ca.key" -out "$work/ca.crt" 2>/dev/null
	issue coordinator
	issue sidecar
fi

# The pod of a host: its name.
host() { k get pods --selector "$is_trainer,$index=$1" --output 'jsonpath={.items[0].metadata.name}'; }
uid() { k get pod "$1" --output 'jsonpath={.metadata.uid}'; }
restarts() { k get pod "$1" --output 'jsonpath={.status.containerStatuses[?(@.name=="trainer")].restartCount}'; }
# Step of the newest committed checkpoint; 0 before there is one.
newest() {
	local found
	found=$(k exec deploy/pannier-coordinator -- pannier ls --json "$root" 2>/dev/null |
		grep '"committed"' | grep -o '/step-[0-9]*' | sed 's|/step-||' | sort -n | tail -n 1) || true
	echo "${found:-0}"
}
newer_than() { (($(newest) > $1)); }
# Sets `step` to that of the newest one.
known() { step=$(newest) && ((step)); }
# left_at POD: sets `left` to the step at which this trainer left its loop: in its last life, or in this one's log until it starts again.
left_at() {
	left=$({ k logs "$1" --container trainer --previous; k logs "$1" --container trainer; } 2>/dev/null |
		sed -n 's/.*leaves at step \([0-9]*\)$/\1/p' | tail -n 1) || true
	[[ -n $left ]]
}
# resumed POD STEP: this trainer has begun there.
resumed() { k logs "$1" --container trainer 2>/dev/null | grep -q "resumes after step $2\$"; }
# resumed_since POD STEP: or later.
resumed_since() {
	local step
	step=$(k logs "$1" --container trainer 2>/dev/null | sed -n 's/.*resumes after step \([0-9]*\)$/\1/p' | tail -n 1)
	[[ -n $step ]] && ((step >= $2))
}
restarted() { (($(restarts "$1" 2>/dev/null || echo 0) > $2)); }
replaced() {
	local pod
	pod=$(host "$1" 2>/dev/null) && [[ -n $pod && $(uid "$pod" 2>/dev/null || echo "$2") != "$2" ]]
}

kubectl kustomize "$overlay" >"$work/objects.yaml"
for each in "$SIDECAR" "$COORDINATOR" "$TRAINER"; do
	grep -q "image: $each\$" "$work/objects.yaml" || fail "the overlay $OVERLAY doesn't run the image $each"
done
index=batch.kubernetes.io/job-completion-index
! grep -q '^kind: LeaderWorkerSet$' "$work/objects.yaml" || index=leaderworkerset.sigs.k8s.io/worker-index

k apply -k "$overlay" >/dev/null
passed "applied deploy/overlays/$OVERLAY in the namespace $namespace"

k rollout status deploy/pannier-coordinator "--timeout=${WITHIN}s" >/dev/null || fail "the coordinator doesn't start"
await "no checkpoint was committed" newer_than 0
await "the checkpoints can't be listed" known
passed "a checkpoint is committed: step-$step"

first=$(host 0)
second=$(host 1)
before=$step
same=$(uid "$second")
count=$(restarts "$second")
# shellcheck disable=SC2016  # expanded in the pod
k exec "$second" --container trainer -- sh -c 'kill -9 "$(cat /tmp/rank-0.pid)"'
await "the trainer of $second didn't start again" restarted "$second" "$count"
[[ $(uid "$second") == "$same" ]] || fail "$second is another pod: its spool is lost"
await "$second didn't resume after step $before or later" resumed_since "$second" "$before"
await "$first didn't resume after step $before or later" resumed_since "$first" "$before"
await "the checkpoints can't be listed" known
await "nothing was committed after the trainers' restart" newer_than "$step"
passed "a rank was killed: trainers start again in their pods and go on"

gone=$(uid "$second")
k delete pod "$second" >/dev/null
await "no pod replaced $second" replaced 1 "$gone"
await "$first didn't leave its loop when $second was deleted" left_at "$first"
second=$(host 1)
await "$second didn't resume after step $left" resumed "$second" "$left"
await "$first didn't resume after step $left" resumed "$first" "$left"
await "nothing was committed after the pod's deletion" newer_than "$left"
passed "a pod was deleted: another one takes its place, and all go on at the very step"

count="$(restarts "$first") $(restarts "$second")"
k delete pod --selector "$is_coordinator" >/dev/null
k rollout status deploy/pannier-coordinator "--timeout=${WITHIN}s" >/dev/null || fail "the coordinator doesn't come back"
await "the coordinator doesn't answer" known
await "nothing was committed after the coordinator's deletion" newer_than "$step"
[[ "$(restarts "$first") $(restarts "$second")" == "$count" ]] || fail "trainers started again without a coordinator"
passed "the coordinator was deleted: saves go on, no trainer noticed"

for each in tls.crt tls.key ca.crt; do
	k get secret pannier-sidecar-tls --output "go-template={{index .data \"$each\" | base64decode}}" >"$work/$each"
done
kubectl --namespace "$namespace" port-forward deploy/pannier-coordinator :7070 >"$work/forward" 2>&1 &
forward=$!
await "kubectl port-forward doesn't listen" grep -qs '^Forwarding from 127.0.0.1:' "$work/forward"
port=$(sed -n 's/^Forwarding from 127.0.0.1:\([0-9]*\) .*/\1/p' "$work/forward")
grpcurl -cert "$work/tls.crt" -key "$work/tls.key" -cacert "$work/ca.crt" -authority pannier-coordinator \
	"localhost:$port" pannier.v1.Status/ListSaves >"$work/saves" || fail "grpcurl got no answer"
grep -q "$root/step-" "$work/saves" || fail "grpcurl shows no save: $(cat "$work/saves")"
passed "grpcurl lists the saves, with the sidecar's certificate, through port-forward"

# Policies reach a new pod after a moment.
try='
import socket, sys, time
time.sleep(5)
for host, port in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        socket.create_connection((host, int(port)), 15).close()
        print("reached", port)
    except OSError as error:
        print("kept out of", port, error)
'
# visitor NAME LABELS: what a pod with these labels reaches, the coordinator and a sidecar's port for its peers.
visitor() {
	k run "$1" --image "$COORDINATOR" --restart Never --labels "$2" --command -- \
		python3 -c "$try" pannier-coordinator 7070 "$address" 7073 >/dev/null
	k wait --for 'jsonpath={.status.phase}=Succeeded' "pod/$1" "--timeout=${WITHIN}s" >/dev/null || fail "the pod $1 didn't end"
	k logs "$1"
}
address=$(k get pod "$first" --output 'jsonpath={.status.podIP}')
ours=$(visitor ours "app.kubernetes.io/name=pannier,app.kubernetes.io/instance=$namespace,$is_trainer")
[[ $ours == *"reached 7070"* && $ours == *"reached 7073"* ]] || fail "the policies keep a pod of the job out: $ours"
strange=$(visitor stranger app=stranger)
[[ $strange != *reached* ]] ||
	fail "a stranger's pod isn't kept out: does this cluster's network plugin enforce NetworkPolicies? $strange"
passed "the policies keep a stranger's pod out, and the job's in"

echo "all that deploy/README.md promises is there"
