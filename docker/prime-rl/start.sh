#!/bin/bash
# Boots the pod: lets the key in PUBLIC_KEY in, and starts the SSH server. Nothing else is started here.
set -euo pipefail
umask 077
if [ -z "${PUBLIC_KEY:-}" ]; then
  echo "PUBLIC_KEY is empty: nobody could get in. Pass the public key of the controller." >&2
  exit 1
fi
mkdir -p /root/.ssh /run/sshd
printf '%s\n' "$PUBLIC_KEY" >/root/.ssh/authorized_keys
ssh-keygen -A # host keys of this pod alone: the image has none

# Sessions of sshd don't see the container's environment. They get what programs need to run, and no key.
{
  printf 'SetEnv'
  for name in PATH LD_LIBRARY_PATH CUDA_HOME LANG TZ NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES AITA_WORKDIR; do
    [ -n "${!name:-}" ] && printf ' %s="%s"' "$name" "${!name}"
  done
  printf '\n'
} >/etc/ssh/sshd_config.d/20-environment.conf

# The dead-man switch ends the pod with the key that Runpod puts into it; for root alone.
env | grep '^RUNPOD_' | sed 's/^\([^=]*\)=\(.*\)$/export \1="\2"/' >/etc/rp_environment || true

ulimit -n 32000 2>/dev/null || echo "the limit of open files stays at $(ulimit -n)" >&2
umask 022
exec /usr/sbin/sshd -D -e
