#!/usr/bin/env bash
# Installs what the tests of slurm/ need, from Debian's packages. Without root or apt it says what is missing.
set -euo pipefail

# libpmix-dev: srun --mpi=pmix loads libpmix.so, the name without a version that only this package has.
packages=(slurmctld slurmd slurm-client munge libpmix-dev shellcheck)
missing=()
for package in "${packages[@]}"; do
    dpkg-query --show --showformat='${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed ||
        missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "make test-slurm needs SLURM, but this machine lacks ${missing[*]} (names of Debian's packages)," >&2
    echo "and they can only be installed by root with apt-get" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet --quiet
apt-get install --yes --quiet --quiet --no-install-recommends "${missing[@]}"
