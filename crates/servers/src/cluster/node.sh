# Makes this process a node: its own network, host name, and the folders that a kubelet, a container runtime and a CNI
# plugin write to. It runs in new mount, network and UTS namespaces, so all of this vanishes with it.
set -eu
name=$1 folder=$2

hostname "$name"
ip link set lo up
# What is mounted from here on propagates to pods, and mounts of pods to other pods, as on a machine with systemd.
mount --make-rshared /

# Files of the machine are visible, and changes stay in the node's folder.
for place in etc opt var; do
    mkdir -p "$folder/$place/changes" "$folder/$place/work"
    mount -t overlay -o "lowerdir=/$place,upperdir=$folder/$place/changes,workdir=$folder/$place/work" overlay "/$place"
done
mount -t tmpfs -o mode=755 tmpfs /run
# An overlay cannot be the upper layer of another one.
for place in var/lib/containerd var/lib/kubelet var/log/pods var/log/containers; do
    mkdir -p "/$place" "$folder/disk/$place"
    mount --bind "$folder/disk/$place" "/$place"
done
mkdir -p /etc/cni/net.d /opt/cni/bin /run/netns

# A kubelet sets these sysctls, which belong to the whole machine. It leaves them alone if they have its values.
sysctl() { echo "$2" >"$folder/sysctl.$(basename "$1")"; mount --bind "$folder/sysctl.$(basename "$1")" "/proc/sys/$1"; }
sysctl vm/overcommit_memory 1
sysctl vm/panic_on_oom 0
sysctl kernel/panic 10
sysctl kernel/panic_on_oops 1
sysctl kernel/keys/root_maxkeys 1000000
sysctl kernel/keys/root_maxbytes 25000000

# The container runtime uses this plugin for each pod.
cp /usr/lib/cni/loopback /opt/cni/bin/
echo "$name is made"
touch "$folder/made"
exec sleep infinity
