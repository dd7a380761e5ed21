//! Objects of each kind as Calico writes them, with every part that a schema may get wrong; and objects with one wrong value.

use serde_json::{Value, json};

/// A policy with every field of Calico's rules, and fields that no version has yet.
fn policy() -> Value {
    json!({
        "tier": "security", "order": 10.5, "selector": "app == 'a'", "types": ["Ingress", "Egress"],
        "serviceAccountSelector": "role == 'x'", "performanceHints": ["AssumeNeededOnEveryNode"],
        "ofTheFuture": {"a": [1, null, {"b": "c"}]},
        "ingress": [{
            "action": "Allow", "ipVersion": 4, "protocol": "TCP", "notProtocol": 17,
            "source": {
                "nets": ["10.0.0.0/8"], "notNets": ["10.1.0.0/16"], "selector": "a == 'b'", "notSelector": "has(c)",
                "namespaceSelector": "all()", "ports": [80, "8000:9000", "http"], "notPorts": [1],
                "serviceAccounts": {"names": ["default"], "selector": "x == 'y'"}, "ofTheFuture": 1,
            },
            "destination": {"ports": [443]},
            "http": {"methods": ["GET"], "paths": [{"exact": "/a"}, {"prefix": "/b"}]},
            "metadata": {"annotations": {"why": "because"}},
        }, {
            "action": "Log", "protocol": "ICMP", "icmp": {"type": 8, "code": 0}, "notICMP": {"type": 0},
        }],
        "egress": [{"action": "Pass", "destination": {"services": {"name": "dns", "namespace": "kube-system"}}}],
    })
}

fn with(mut spec: Value, more: &Value) -> Value {
    for (name, value) in more.as_object().unwrap() {
        spec[name] = value.clone();
    }
    spec
}

/// The kind and `spec` (of a NodeReport: `status`) of objects that must be kept as they are.
pub(crate) fn complete() -> Vec<(&'static str, Value)> {
    let staged = json!({"stagedAction": "Learn"});
    let for_cluster =
        json!({"namespaceSelector": "all()", "doNotTrack": true, "preDNAT": false, "applyOnForward": true});
    vec![
        ("NetworkPolicy", policy()),
        ("GlobalNetworkPolicy", with(policy(), &for_cluster)),
        ("StagedNetworkPolicy", with(policy(), &staged)),
        ("StagedGlobalNetworkPolicy", with(with(policy(), &for_cluster), &staged)),
        (
            "StagedKubernetesNetworkPolicy",
            json!({
                "stagedAction": "Set", "podSelector": {"matchLabels": {"a": "b"}}, "policyTypes": ["Ingress"],
                "ingress": [{
                    "from": [{
                        "ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]},
                        "namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]},
                    }],
                    "ports": [{"port": "http"}, {"port": 80, "protocol": "TCP", "endPort": 90}],
                }],
                "egress": [{"to": [{"podSelector": {}}]}],
            }),
        ),
        ("Tier", json!({"order": 1_000_000, "defaultAction": "Pass"})),
        ("NetworkSet", json!({"nets": ["10.0.0.0/8", "10.0.0.1", "fd00::/8"]})),
        ("GlobalNetworkSet", json!({"nets": []})),
        (
            "HostEndpoint",
            json!({
                "node": "primary", "interfaceName": "*", "expectedIPs": ["192.0.2.1"], "profiles": ["p"],
                "ports": [{"name": "http", "protocol": "TCP", "port": 80}, {"name": "ospf", "protocol": 89, "port": 1}],
            }),
        ),
        (
            "IPPool",
            json!({
                "cidr": "10.244.0.0/16", "blockSize": 26, "vxlanMode": "Always", "ipipMode": "CrossSubnet",
                "natOutgoing": true, "disabled": false, "disableBGPExport": false, "nodeSelector": "all()",
                "namespaceSelector": "a == 'b'", "allowedUses": ["Workload", "Tunnel", "LoadBalancer"],
                "assignmentMode": "Manual", "awsSubnetID": "subnet-0", "ofTheFuture": true,
            }),
        ),
        (
            "FelixConfiguration",
            json!({
                "bpfEnabled": false, "defaultEndpointToHostAction": "ACCEPT", "logSeverityScreen": "info",
                "netlinkTimeout": "1m30.5s", "natPortRange": "32768:65535", "vxlanVNI": 4096, "wireguardMTU": 0,
                "failsafeInboundHostPorts": [{"port": 22}, {"port": 53, "protocol": "udp", "net": "10.0.0.0/8"}],
                "kubeNodePortRanges": [30000, "30000:32767"], "routeTableRanges": [{"min": 1, "max": 250}],
                "healthTimeoutOverrides": [{"name": "x", "timeout": "10s"}], "bpfLogFilters": {"all": "tcp"},
                "nodeSelector": "all()", "chainInsertMode": "insert", "externalNodesList": ["10.0.0.1"],
                "ofTheFuture": "x",
            }),
        ),
        ("IPReservation", json!({"reservedCIDRs": ["10.244.0.0/24", "10.244.1.1", "fd00::/64"]})),
        (
            "BGPPeer",
            json!({
                "node": "a", "peerIP": "10.0.0.1:179", "asNumber": "1.10", "localASNumber": 64512, "filters": ["f"],
                "password": {"secretKeyRef": {"name": "s", "key": "k"}}, "sourceAddress": "None", "ttlSecurity": 2,
                "keepaliveTime": "10s", "maxRestartTime": "2m0s", "nextHopMode": "Self", "reversePeering": "Manual",
                "numAllowedLocalASNumbers": 1, "reachableBy": "10.0.0.2", "ofTheFuture": 1,
            }),
        ),
        (
            "BGPConfiguration",
            json!({
                "asNumber": 64512, "nodeToNodeMeshEnabled": true, "logSeverityScreen": "Info", "listenPort": 179,
                "serviceClusterIPs": [{"cidr": "10.96.0.0/12"}], "communities": [{"name": "a", "value": "1:2"}],
                "prefixAdvertisements": [{"cidr": "10.0.0.0/8", "communities": ["a"]}], "bindMode": "NodeIP",
                "nodeMeshPassword": {"secretKeyRef": {"name": "s", "key": "k"}}, "nodeMeshMaxRestartTime": "2m0s",
                "ignoredInterfaces": ["eth*"], "programClusterRoutes": "EnabledNoEncapOnly", "ofTheFuture": {"a": 1},
                "ipv4NormalRoutePriority": 1024, "localWorkloadPeeringIPV4": "10.0.0.1",
            }),
        ),
        (
            "BGPFilter",
            json!({
                "exportV4": [{"action": "Accept", "cidr": "10.0.0.0/8", "matchOperator": "In", "prefixLength": {"min": 8},
                    "communities": {"values": ["1:2"]}, "operations": [{"setPriority": {"value": 1}}]}],
                "importV6": [{"action": "Reject", "source": "RemotePeers", "peerType": "eBGP", "asPathPrefix": [1]}],
                "ofTheFuture": [],
            }),
        ),
        (
            "ClusterInformation",
            json!({"clusterGUID": "0", "clusterType": "k8s", "calicoVersion": "v3.32.0", "datastoreReady": true,
                "variant": "Calico", "ofTheFuture": 1}),
        ),
        (
            "CalicoNodeStatus",
            json!({"node": "a", "classes": ["Agent", "BGP", "Routes"], "updatePeriodSeconds": 10, "ofTheFuture": 1}),
        ),
        (
            "KubeControllersConfiguration",
            json!({
                "logSeverityScreen": "Info", "healthChecks": "Enabled", "etcdV3CompactionPeriod": "10m0s",
                "prometheusMetricsPort": 9094, "debugProfilePort": 0, "ofTheFuture": 1,
                "controllers": {
                    "node": {
                        "reconcilerPeriod": "5m0s", "syncLabels": "Enabled", "leakGracePeriod": "15m0s",
                        "hostEndpoint": {"autoCreate": "Disabled", "createDefaultHostEndpoint": "Enabled", "templates": [
                            {"generateName": "x", "interfaceCIDRs": ["10.0.0.0/8"], "labels": {"a": "b"}, "nodeSelector": "all()"},
                        ]},
                    },
                    "policy": {"reconcilerPeriod": "5m0s"}, "workloadEndpoint": {"reconcilerPeriod": "5m0s"},
                    "serviceAccount": {"reconcilerPeriod": "5m0s"}, "namespace": {"reconcilerPeriod": "5m0s"},
                    "loadBalancer": {"assignIPs": "AllServices"}, "migration": {"policyNameMigrator": "Enabled"},
                },
            }),
        ),
        (
            "IPAMBlock",
            json!({
                "cidr": "10.244.0.0/30", "affinity": "host:primary", "affinityClaimTime": "2026-01-01T00:00:00Z",
                "strictAffinity": false, "deleted": false, "allocations": [0, null, 1, null], "unallocated": [3, 1],
                "attributes": [
                    {"handle_id": "h", "secondary": {"node": "primary", "pod": "a"}},
                    {"handle_id": "i", "releasedAt": "2026-01-01T00:00:00Z", "alternateOwnerAttrs": {"pod": "b"}},
                ],
                "sequenceNumber": 1_795_000_000_123_456_789_u64,
                "sequenceNumberForAllocation": {"0": 1_795_000_000_123_456_788_u64},
            }),
        ),
        (
            "BlockAffinity",
            json!({"cidr": "10.244.0.0/30", "node": "primary", "state": "confirmed", "type": "host", "deleted": "false"}),
        ),
        (
            "IPAMHandle",
            json!({"handleID": "k8s-pod-network.ABC", "block": {"10.244.0.0/30": 1}, "deleted": false}),
        ),
        (
            "IPAMConfig",
            json!({
                "strictAffinity": false, "autoAllocateBlocks": true, "maxBlocksPerHost": 0, "ipCooldownSeconds": 30,
                "kubeVirtVMAddressPersistence": "Disabled",
            }),
        ),
        (
            "NodeReport",
            json!({
                "os": "linux", "positions": {"Pod": 9_007_199_254_740_993_u64}, "endpoints": 1, "more": 0,
                "conditions": [{
                    "object": {"kind": "Pod", "namespace": "a", "name": "b"}, "reason": "NotExpressible", "message": "x",
                    "about": [{"kind": "Tier", "name": "c", "rule": {"direction": "Ingress", "number": 1}}],
                }],
                "staticRules": [{"name": "r", "allow": true, "direction": "Egress", "local": {}, "remote": {
                    "nets": ["10.0.0.0/8"], "ports": [{"first": 1, "last": 2}],
                }}],
                "ofTheFuture": {"a": 1},
            }),
        ),
    ]
}

/// The kind, `spec` (of a NodeReport: `status`) and wrong field of objects that must be rejected.
pub(crate) fn wrong() -> Vec<(&'static str, Value, &'static str)> {
    let rule = |rule: Value| json!({"ingress": [rule]});
    vec![
        ("NetworkPolicy", json!({"order": "first"}), "spec.order"),
        ("NetworkPolicy", rule(json!({"action": "allow"})), "spec.ingress[0].action"),
        ("NetworkPolicy", rule(json!({"protocol": "TCP"})), "spec.ingress[0].action"),
        ("NetworkPolicy", rule(json!({"action": "Deny", "protocol": {}})), "spec.ingress[0].protocol"),
        (
            "NetworkPolicy",
            rule(json!({"action": "Deny", "icmp": {"type": 256}})),
            "spec.ingress[0].icmp.type",
        ),
        (
            "GlobalNetworkPolicy",
            rule(json!({"action": "Deny", "source": {"nets": "10.0.0.0/8"}})),
            "spec.ingress[0].source.nets",
        ),
        ("GlobalNetworkPolicy", json!({"doNotTrack": "yes"}), "spec.doNotTrack"),
        ("StagedNetworkPolicy", json!({"stagedAction": "Maybe"}), "spec.stagedAction"),
        ("StagedGlobalNetworkPolicy", json!({"types": ["Both"]}), "spec.types[0]"),
        (
            "StagedKubernetesNetworkPolicy",
            json!({"ingress": [{"from": [{"ipBlock": {"except": []}}]}]}),
            "spec.ingress[0].from[0].ipBlock.cidr",
        ),
        ("Tier", json!({"defaultAction": "Allow"}), "spec.defaultAction"),
        ("NetworkSet", json!({"nets": [1]}), "spec.nets[0]"),
        ("GlobalNetworkSet", json!({"nets": {}}), "spec.nets"),
        (
            "HostEndpoint",
            json!({"ports": [{"name": "a", "protocol": "TCP", "port": 65_536}]}),
            "spec.ports[0].port",
        ),
        ("HostEndpoint", json!({"ports": [{"name": "a", "port": 1}]}), "spec.ports[0].protocol"),
        ("IPPool", json!({"vxlanMode": "Always"}), "spec.cidr"),
        ("IPReservation", json!({"reservedCIDRs": "10.0.0.0/8"}), "spec.reservedCIDRs"),
        ("IPPool", json!({"cidr": "10.0.0.0/8", "vxlanMode": "Sometimes"}), "spec.vxlanMode"),
        ("FelixConfiguration", json!({"bpfEnabled": "yes"}), "spec.bpfEnabled"),
        ("FelixConfiguration", json!({"netlinkTimeout": "soon"}), "spec.netlinkTimeout"),
        (
            "FelixConfiguration",
            json!({"failsafeInboundHostPorts": [{}]}),
            "spec.failsafeInboundHostPorts[0].port",
        ),
        ("IPAMBlock", json!({"cidr": "10.0.0.0/30"}), "spec.allocations"),
        (
            "BlockAffinity",
            json!({"cidr": "10.0.0.0/30", "node": "a", "state": "confirmed", "deleted": true}),
            "spec.deleted",
        ),
        ("IPAMHandle", json!({"handleID": "h", "block": {"10.0.0.0/30": "1"}}), "spec.block"),
        ("IPAMConfig", json!({"strictAffinity": true}), "spec.autoAllocateBlocks"),
        ("NodeReport", json!({"positions": {"Pod": "7"}}), "status.positions.Pod"),
    ]
}
