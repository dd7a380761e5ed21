//! The configuration files of a node's programs.

use std::net::Ipv4Addr;
use std::path::Path;

/// The address of the cluster's DNS, if somebody installs one.
const DNS: &str = "10.96.0.10";

/// containerd's configuration. The image of a pod's sandbox is imported, as nothing can be downloaded.
pub(super) fn containerd(sandbox_image: &str) -> String {
    format!(
        r#"version = 2
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
address = "/run/containerd/containerd.sock"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{sandbox_image}"
# A machine may refuse negative values.
restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/opt/cni/bin"
conf_dir = "/etc/cni/net.d"
"#
    )
}

/// The kubelet's configuration.
pub(super) fn kubelet(authority: &Path, address: Ipv4Addr, cgroup: &str) -> String {
    format!(
        "apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: {address}
authentication:
  anonymous: {{enabled: false}}
  webhook: {{enabled: true}}
  x509: {{clientCAFile: {authority}}}
authorization: {{mode: Webhook}}
cgroupDriver: cgroupfs
cgroupRoot: {cgroup}
clusterDNS: [{DNS}]
clusterDomain: cluster.local
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
# The requests of its pods are not reserved: the nodes share one machine with its other programs.
enforceNodeAllocatable: []
# Machines with cgroups of version 1 serve, too.
failCgroupV1: false
failSwapOn: false
evictionHard: {{memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%}}
# Images cannot be downloaded again.
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
maxPods: 300
volumePluginDir: /var/lib/kubelet/volume-plugins
",
        authority = authority.display()
    )
}

/// kube-proxy's configuration.
pub(super) fn kube_proxy(kubeconfig: &Path, node: &str, address: Ipv4Addr, pods: &str) -> String {
    format!(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
bindAddress: {address}
clientConnection: {{kubeconfig: {kubeconfig}}}
clusterCIDR: {pods}
# These sysctls belong to the whole machine.
conntrack: {{maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}}
hostnameOverride: {node}
",
        kubeconfig = kubeconfig.display()
    )
}
