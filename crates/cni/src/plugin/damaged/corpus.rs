//! Valid calls and results to start from, in the forms of real configurations: damage close to validity reaches deeper than noise.

use serde_json::{Value, json};

/// Where no file and no socket can be.
pub(super) const NOWHERE: &str = "/dev/null/tortie";

pub(super) const COMMANDS: [&str; 6] = ["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"];
pub(super) const CONTAINERS: [&str; 3] = [
    "c1",
    "cnitool-77383ca0a0715733ca6f",
    "8d3e0b8f3d4a8d1c7d25f6dfc1d2c1a1e4f8a7b6c5d4e3f2a1b0c9d8e7f6a5b4",
];
pub(super) const NETNS: [&str; 3] = ["/run/netns/x", "/var/run/netns/cni-5f2e-8d3e", "/proc/1/ns/net"];
pub(super) const INTERFACES: [&str; 3] = ["eth0", "net1", "fifteen-letters"];

/// What runtimes set: containerd and CRI-O, cnitool, the specification's example, and an address that a runtime asks for.
pub(super) const ARGS: [&str; 6] = [
    "IgnoreUnknown=1;K8S_POD_NAMESPACE=n;K8S_POD_NAME=p;K8S_POD_INFRA_CONTAINER_ID=c1;K8S_POD_UID=u",
    "K8S_POD_UID=4f0b;IgnoreUnknown=1;K8S_POD_NAMESPACE=kube-system;K8S_POD_NAME=coredns-0;K8S_POD_INFRA_CONTAINER_ID=8d3e",
    "",
    "FOO=BAR;ABC=123",
    "IgnoreUnknown=true;IP=10.0.0.7;MAC=0a:00:00:00:00:07;K8S_POD_NAMESPACE=n;K8S_POD_NAME=p",
    "IP=;A=B=C;;",
];

/// The part of a network configuration that a runtime passes to one plugin, as other plugins and their documentation have it.
fn parts() -> Vec<Value> {
    vec![
        json!({}),
        // The agent's own.
        json!({"capabilities": {"io.kubernetes.cri.pod-annotations": true}, "mtu": 1400, "cni.dev/attachments": []}),
        // Calico's, for Linux and for Windows.
        json!({"log_level": "info", "log_file_path": "/var/log/calico/cni/cni.log", "datastore_type": "kubernetes", "nodename": "alpha",
            "mtu": 0, "ipam": {"type": "calico-ipam", "assign_ipv4": "true", "assign_ipv6": "false", "ipv4_pools": ["10.0.0.0/16", "a"]},
            "container_settings": {"allow_ip_forwarding": false}, "policy": {"type": "k8s"},
            "kubernetes": {"kubeconfig": "/etc/cni/net.d/calico-kubeconfig"}, "feature_control": {"ip_addrs_no_ipam": true}}),
        json!({"windows_use_single_network": true, "mode": "vxlan", "vxlan_mac_prefix": "0E-2A", "vxlan_vni": 4096, "nodename_file": "C:\\n",
            "ipam": {"type": "calico-ipam", "subnet": "usePodCidr"}, "dns": {"Nameservers": ["10.96.0.10"], "Search": ["svc.cluster.local"]},
            "policies": [{"Name": "EndpointPolicy", "Value": {"Type": "OutBoundNAT", "ExceptionList": ["10.96.0.0/12"]}}]}),
        // What flannel delegates.
        json!({"hairpinMode": true, "isDefaultGateway": true, "ipMasq": false, "isGateway": true, "mtu": 1450,
            "delegate": {"hairpinMode": true}, "ipam": {"type": "host-local", "dataDir": NOWHERE, "ranges": [[{"subnet": "10.244.1.0/24"}]],
                "routes": [{"dst": "10.244.0.0/16"}, {"dst": "0.0.0.0/0"}]}}),
        // The specification's examples.
        json!({"bridge": "cni0", "keyA": ["some more", "plugin specific", "configuration"], "args": {"labels": {"appVersion": "1.0"}},
            "ipam": {"type": "host-local", "dataDir": NOWHERE, "subnet": "10.1.0.0/16", "gateway": "10.1.0.1", "routes": [{"dst": "0.0.0.0/0"}]},
            "dns": {"nameservers": ["10.1.0.1"], "domain": "a", "search": ["b"], "options": ["ndots:5"]}}),
        json!({"sysctl": {"net.core.somaxconn": "500"}, "disableCheck": true, "disableGC": false, "loadOnlyInlinedPlugins": false}),
        json!({"cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "eth0"}, {"containerID": "c2", "ifname": "net1"}]}),
        json!({"cni.dev/valid-attachments": null, "cni.dev/attachments": null}),
        // Every capability that the specification and its conventions name.
        json!({"capabilities": {"portMappings": true, "ipRanges": true, "bandwidth": true, "dns": true, "ips": true, "mac": true,
                "infinibandGUID": true, "deviceID": true, "aliases": true, "cgroupPath": true},
            "runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": "192.0.2.1"}],
                "ipRanges": [[{"subnet": "10.1.2.0/24", "rangeStart": "10.1.2.3", "rangeEnd": "10.1.2.99", "gateway": "10.1.2.254"}]],
                "bandwidth": {"ingressRate": 2048, "ingressBurst": 1600, "egressRate": 4096, "egressBurst": 1600},
                "dns": {"searches": ["a.svc"], "servers": ["8.8.8.8"], "options": ["ndots:2"]}, "ips": ["10.0.0.7/24"],
                "mac": "c2:11:22:33:44:55", "infinibandGUID": "c2:11:22:33:44:55:66:77", "deviceID": "0000:04:00.5", "aliases": ["web"],
                "cgroupPath": "/kubelet/pod1", "io.kubernetes.cri.pod-annotations": {"kubernetes.io/ingress-bandwidth": "1M"}}}),
        // IPAM: all of host-local, Calico's short form, other plugins, and none.
        json!({"ipam": {"type": "host-local", "dataDir": NOWHERE, "ranges": [[{"subnet": "10.0.0.0/8", "rangeStart": "10.0.0.9", "rangeEnd": "10.1.0.0"},
                {"subnet": "192.0.2.0/24", "gateway": "192.0.2.7"}]], "routes": [{"dst": "0.0.0.0/0", "gw": "0.0.0.0"}]},
            "args": {"cni": {"ips": ["10.0.0.9"]}}}),
        json!({"ipam": {"type": "host-local", "dataDir": NOWHERE, "subnet": "usePodCidr", "resolvConf": NOWHERE}}),
        json!({"ipam": {"type": "host-local", "dataDir": NOWHERE, "subnet": "0.0.0.0/0"}}),
        json!({"ipam": {"type": "host-local", "dataDir": NOWHERE, "ranges": [[{"subnet": "10.1.2.0/24"}], [{"subnet": "fd00::/64"}]]}}),
        json!({"ipam": {"type": "static", "addresses": [{"address": "10.10.0.1/24", "gateway": "10.10.0.254"}]}}),
        json!({"ipam": {"type": "dhcp", "daemonSocketPath": NOWHERE, "request": [{"option": "router", "skipDefault": false}]}}),
        json!({"ipam": {}}),
        json!({"ipam": null, "master": "eth1", "vlanId": 5, "promiscMode": true, "linkInContainer": false}),
    ]
}

/// Configurations of all versions, without `prevResult`.
pub(super) fn configurations() -> Vec<Value> {
    let versions = crate::SUPPORTED_VERSIONS.iter().rev().cycle();
    let configurations = parts().into_iter().zip(versions).map(|(part, version)| {
        let mut config = json!({"cniVersion": version, "name": "net", "type": "tortie-cni", "agentSocket": NOWHERE, "deletionQueue": NOWHERE});
        for (name, value) in part.as_object().into_iter().flatten() {
            config[name] = value.clone();
        }
        config
    });
    configurations.collect()
}

/// Results of plugins in all versions: Tortie's own, those of bridge, Calico and chained plugins, and those without interfaces.
pub(super) fn results() -> Vec<Value> {
    vec![
        json!({"cniVersion": "1.0.0", "interfaces": [{"name": "cali1", "mac": "ee:ee:ee:ee:ee:ee"}, {"name": "eth0", "sandbox": "/n"}],
            "ips": [{"address": "10.0.0.1/32", "interface": 1}], "routes": [{"dst": "0.0.0.0/0", "gw": "169.254.1.1"}], "dns": {}}),
        json!({"cniVersion": "0.3.1", "interfaces": [{"name": "cni0", "mac": "00:11:22:33:44:55"}, {"name": "veth3243", "mac": "55:44:33:22:11:11"},
                {"name": "eth0", "mac": "99:88:77:66:55:44", "sandbox": "/var/run/netns/blue"}],
            "ips": [{"version": "4", "address": "10.1.0.5/16", "gateway": "10.1.0.1", "interface": 2}],
            "routes": [{"dst": "0.0.0.0/0"}], "dns": {"nameservers": ["10.1.0.1"]}}),
        json!({"cniVersion": "0.4.0", "interfaces": [{"name": "eth0", "sandbox": ""}, {"name": "net1"}], "ips": [{"version": "4", "address": "10.244.1.7/32"},
            {"version": "6", "address": "fd00::7/128"}], "dns": {}}),
        json!({"cniVersion": "0.3.0", "ips": [{"version": "4", "address": "10.1.0.5/16", "interface": -1}]}),
        json!({"cniVersion": "1.1.0", "interfaces": [{"name": "net1", "mac": "0a:00:00:00:00:01", "mtu": 1500, "sandbox": "/n", "socketPath": "/s",
                "pciID": "0000:04:00.5"}], "ips": [{"address": "192.0.2.9/24", "gateway": "192.0.2.1", "interface": 0}],
            "routes": [{"dst": "198.51.100.0/24", "gw": "192.0.2.2", "mtu": 1400, "advmss": 1360, "priority": 100, "table": 5, "scope": 253}],
            "dns": {"nameservers": ["192.0.2.53"], "domain": "d", "search": ["a.svc"], "options": ["timeout:1"]}}),
        json!({"cniVersion": "1.0.0", "interfaces": null, "ips": null, "routes": null, "dns": null}),
        json!({"cniVersion": "0.2.0", "ip4": {"ip": "10.3.0.5/16", "gateway": "10.3.0.1", "routes": [{"dst": "0.0.0.0/0"}]}, "dns": {}}),
        json!({}),
        Value::Null,
    ]
}
