//! Addresses and pools that a pod requests by annotations, or the runtime by its call.

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_cni::transport::Answer;
use tortie_cni::{Code, Command, Invocation};

use crate::common::{Bed, NODE, pod_key, put, until};

const ADDRESSES: &str = "cni.projectcalico.org/ipAddrs";
const POOLS: &str = "cni.projectcalico.org/ipv4pools";

impl Bed {
    async fn annotated(&self, name: &str, annotation: &str, text: &str) {
        let value = json!({
            "metadata": {"name": name, "namespace": "n", "uid": name, "annotations": {(annotation): text}},
            "spec": {"nodeName": NODE, "containers": [{"name": "c"}]},
        });
        put(&*self.store, &pod_key(name), value).await;
    }

    async fn annotate_namespace(&self, annotation: &str, text: &str) {
        let value = json!({"metadata": {"name": "n", "annotations": {(annotation): text}}});
        put(&*self.store, &Key::global(Kind::Namespace, "n"), value).await;
    }

    async fn with_host_port(&self, name: &str, port: u16) {
        let ports = json!([{"containerPort": 80, "hostPort": port}]);
        let value = json!({
            "metadata": {"name": name, "namespace": "n", "uid": name},
            "spec": {"nodeName": NODE, "containers": [{"name": "c", "ports": ports}]},
        });
        put(&*self.store, &pod_key(name), value).await;
    }

    async fn add(&self, container: &str, pod: &str) -> Answer {
        self.call(self.invocation(Command::Add, container, pod)).await
    }

    async fn pool(&self, name: &str, spec: Value) {
        put(
            &*self.store,
            &Key::global(Kind::IpPool, name),
            json!({"metadata": {"name": name}, "spec": spec}),
        )
        .await;
    }
}

fn address(answer: Answer) -> String {
    let address = answer.unwrap().unwrap().ips[0].address.clone();
    address.split('/').next().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_gets_the_address_that_it_requests() {
    let bed = Bed::new().await;
    bed.annotated("p", ADDRESSES, r#"["10.0.0.77"]"#).await;
    for _ in 0..2 {
        assert_eq!(address(bed.add("c1", "p").await), "10.0.0.77", "also if the call is repeated");
    }
    let endpoint = bed.endpoint("p", "eth0").await.unwrap();
    assert_eq!(endpoint["spec"]["ipNetworks"], json!(["10.0.0.77/32"]));
    bed.annotated("q", ADDRESSES, r#"["10.0.0.77"]"#).await;
    let failure = bed.add("c2", "q").await.unwrap_err();
    assert_eq!(failure.code, Code::IPAM);
    assert!(failure.details.contains("pod n/p has it on node"), "{failure:?}");
    bed.annotated("q", ADDRESSES, r#"["192.168.0.1"]"#).await;
    let failure = bed.add("c2", "q").await.unwrap_err();
    assert!(failure.details.contains("is in no enabled IPPool"), "{failure:?}");
    assert_eq!(bed.allocated().await, ["10.0.0.77"], "a failed ADD leaves nothing");
    bed.call(bed.invocation(Command::Del, "c1", "p")).await.unwrap();
    bed.annotated("q", ADDRESSES, r#"["10.0.0.77"]"#).await;
    assert_eq!(address(bed.add("c2", "q").await), "10.0.0.77");
}

/// The DEL of a sandbox may come after the ADD of the next one, for instance after a crash of the node.
#[tokio::test(flavor = "multi_thread")]
async fn the_next_sandbox_of_a_pod_takes_the_address_over() {
    let bed = Bed::new().await;
    bed.annotated("p", ADDRESSES, r#"["10.0.0.77"]"#).await;
    bed.add("c1", "p").await.unwrap();
    // Another interface of the same sandbox has no right to it.
    let second = Invocation { interface: "net1".to_owned(), ..bed.invocation(Command::Add, "c1", "p") };
    let failure = bed.call(second).await.unwrap_err();
    assert!(failure.details.contains("is taken"), "{failure:?}");
    assert_eq!(address(bed.add("c2", "p").await), "10.0.0.77");
    bed.call(bed.invocation(Command::Del, "c1", "p")).await.unwrap();
    assert_eq!(bed.allocated().await, ["10.0.0.77"]);
    bed.call(bed.invocation(Command::Check, "c2", "p")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_gets_an_address_of_the_pools_that_it_or_its_namespace_requests() {
    let bed = Bed::new().await;
    for (name, cidr) in [("one", "10.1.0.0/24"), ("two", "10.2.0.0/24")] {
        let spec = json!({"cidr": cidr, "vxlanMode": "Always", "nodeSelector": "has(nobody)"});
        bed.pool(name, spec).await;
    }
    bed.pod("a", "a", json!({})).await;
    assert!(address(bed.add("c1", "a").await).starts_with("10.0.0."));
    bed.annotate_namespace(POOLS, r#"["one"]"#).await;
    bed.pod("b", "b", json!({})).await;
    assert!(address(bed.add("c2", "b").await).starts_with("10.1.0."));
    bed.annotated("c", POOLS, r#"["10.2.0.0/24"]"#).await;
    assert!(address(bed.add("c3", "c").await).starts_with("10.2.0."));
    bed.annotated("d", POOLS, r#"["three"]"#).await;
    let failure = bed.add("c4", "d").await.unwrap_err();
    assert_eq!(failure.code, Code::IPAM);
    assert!(failure.details.contains("no IPPool has this name"), "{failure:?}");
    bed.annotated("d", POOLS, "[]").await;
    assert!(address(bed.add("c4", "d").await).starts_with("10.0.0."), "the pod's annotation wins");
    // The configuration of the network comes last.
    bed.annotate_namespace("example.org/other", "").await;
    bed.pod("e", "e", json!({})).await;
    let mut call = bed.invocation(Command::Add, "c5", "e");
    call.config.extra.insert("ipam".to_owned(), json!({"type": "calico-ipam", "ipv4_pools": ["two"]}));
    assert!(address(bed.call(call).await).starts_with("10.2.0."));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_runtime_may_request_an_address() {
    let bed = Bed::new().await;
    let with = |container: &str, pod: &str, name: &str, value: Value| {
        let mut call = bed.invocation(Command::Add, container, pod);
        call.config.extra.insert(name.to_owned(), value);
        call
    };
    for name in ["a", "b", "c", "d"] {
        bed.pod(name, name, json!({})).await;
    }
    let call = with("c1", "a", "runtimeConfig", json!({"ips": ["10.0.0.70/24"]}));
    assert_eq!(address(bed.call(call).await), "10.0.0.70");
    let call = with("c2", "b", "args", json!({"cni": {"ips": ["10.0.0.71"]}}));
    assert_eq!(address(bed.call(call).await), "10.0.0.71");
    let mut call = bed.invocation(Command::Add, "c3", "c");
    call.args.insert("IP".to_owned(), "10.0.0.72".to_owned());
    assert_eq!(address(bed.call(call).await), "10.0.0.72");
    for (ips, code) in [
        (json!(["10.0.0.73", "10.0.0.74"]), Code::NOT_SUPPORTED),
        (json!(["fd00::1/64"]), Code::NOT_SUPPORTED),
        (json!(["x"]), Code::INVALID_CONFIG),
        (json!("10.0.0.73"), Code::INVALID_CONFIG),
    ] {
        let call = with("c4", "d", "runtimeConfig", json!({"ips": ips}));
        assert_eq!(bed.call(call).await.unwrap_err().code, code, "{ips}");
    }
    until("nothing remains of the failed ones", || async { bed.allocated().await.len() == 3 }).await;
}

/// An address that no IPAM knows belongs to one pod of the node, too.
#[tokio::test(flavor = "multi_thread")]
async fn a_pod_gets_an_address_outside_of_ipam_if_the_network_allows_it() {
    const OUTSIDE: &str = "cni.projectcalico.org/ipAddrsNoIpam";
    let bed = Bed::new().await;
    let allowed = |command, container: &str, pod: &str| {
        let mut call = bed.invocation(command, container, pod);
        call.config.extra.insert("feature_control".to_owned(), json!({"ip_addrs_no_ipam": true}));
        call
    };
    bed.annotated("p", OUTSIDE, r#"["192.168.7.7"]"#).await;
    let failure = bed.add("c1", "p").await.unwrap_err();
    assert!(failure.details.contains("feature_control.ip_addrs_no_ipam"), "{failure:?}");
    for _ in 0..2 {
        assert_eq!(address(bed.call(allowed(Command::Add, "c1", "p")).await), "192.168.7.7");
    }
    let endpoint = bed.endpoint("p", "eth0").await.unwrap();
    assert_eq!(endpoint["spec"]["ipNetworks"], json!(["192.168.7.7/32"]));
    bed.call(allowed(Command::Check, "c1", "p")).await.unwrap();
    assert!(bed.allocated().await.is_empty());
    bed.annotated("q", OUTSIDE, r#"["192.168.7.7"]"#).await;
    let failure = bed.call(allowed(Command::Add, "c2", "q")).await.unwrap_err();
    assert!(failure.msg.contains("belongs to pod n/p"), "{failure:?}");
    for (text, expected) in [(r#"["10.0.0.9"]"#, "is in IPPool default"), (r#"["x"]"#, "is not supported")] {
        bed.annotated("q", OUTSIDE, text).await;
        let failure = bed.call(allowed(Command::Add, "c2", "q")).await.unwrap_err();
        assert!(failure.msg.contains(expected), "{failure:?}");
    }
    // GC removes what the runtime does not know of this network, and nothing of another one.
    let mut gc = allowed(Command::Gc, "", "");
    gc.config.valid_attachments = Some(Vec::new());
    let mut of_another = gc.clone();
    of_another.config.name = "another".to_owned();
    bed.call(of_another).await.unwrap();
    assert!(bed.endpoint("p", "eth0").await.is_some());
    bed.call(gc).await.unwrap();
    assert!(bed.endpoint("p", "eth0").await.is_none());
    bed.annotated("q", OUTSIDE, r#"["192.168.7.7"]"#).await;
    // The node's dataplane learns a moment later that the first pod is gone.
    until("the address is free", || async { bed.call(allowed(Command::Add, "c2", "q")).await.is_ok() }).await;
    bed.call(allowed(Command::Del, "c2", "q")).await.unwrap();
    assert!(bed.endpoint("q", "eth0").await.is_none());
}

/// Two pods at the same moment, before either of them has an endpoint.
#[tokio::test(flavor = "multi_thread")]
async fn an_address_outside_of_ipam_goes_to_one_of_two_pods_at_once() {
    let bed = Bed::new().await;
    let address = r#"["192.168.7.7"]"#;
    bed.annotated("p", "cni.projectcalico.org/ipAddrsNoIpam", address).await;
    bed.annotated("q", "cni.projectcalico.org/ipAddrsNoIpam", address).await;
    let add = |container: &str, pod: &str| {
        let mut call = bed.invocation(Command::Add, container, pod);
        call.config.extra.insert("feature_control".to_owned(), json!({"ip_addrs_no_ipam": true}));
        bed.call(call)
    };
    let open = bed.os.hold("c1");
    let later = async {
        until("the first pod is being connected", || async { bed.os.is_held("c1") }).await;
        let opened = async {
            // Time for the second to overtake, which it must not.
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
            drop(open);
        };
        tokio::join!(add("c2", "q"), opened).0
    };
    let (first, second) = tokio::join!(add("c1", "p"), later);
    first.unwrap();
    let failure = second.unwrap_err();
    assert!(failure.msg.contains("belongs to pod n/p"), "{failure:?}");
    assert!(bed.endpoint("q", "eth0").await.is_none());
}

const POOLS_V6: &str = "cni.projectcalico.org/ipv6pools";

/// The networks of the addresses in an answer, or the text of the failure.
fn networks(answer: Answer) -> Result<Vec<String>, String> {
    let success = answer.map_err(|failure| failure.to_string())?.unwrap();
    let network = |text: &str| {
        let net: ipnet::IpNet = text.parse().unwrap();
        assert_eq!(net.prefix_len(), net.max_prefix_len());
        let length = if net.addr().is_ipv4() { 16 } else { 48 };
        ipnet::IpNet::new(net.addr(), length).unwrap().trunc().to_string()
    };
    assert_eq!(success.routes.len(), success.ips.len());
    Ok(success.ips.iter().map(|ip| network(&ip.address)).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_gets_an_address_of_each_family_that_has_a_pool() {
    const V4: &str = "10.0.0.0/16";
    let (a, b) = ("fd00:a::/48", "fd00:b::/48");
    let bed = Bed::new().await;
    bed.os.lock().has_ipv6 = true;
    bed.pool("six", json!({"cidr": "fd00:a::/64", "nodeSelector": "all()"})).await;
    bed.pool("other", json!({"cidr": "fd00:b::/64", "nodeSelector": "none == 'x'"})).await;
    let none = json!({"type": "calico-ipam"});
    for (number, (ipam, annotation, text, expected)) in [
        (none.clone(), "", "", Ok(vec![V4, a])),
        (json!({"assign_ipv6": "false"}), "", "", Ok(vec![V4])),
        (json!({"assign_ipv4": "false"}), "", "", Ok(vec![a])),
        (json!({"assign_ipv4": "true", "assign_ipv6": "true"}), "", "", Ok(vec![V4, a])),
        (json!({"ipv6_pools": ["fd00:b::/64"]}), "", "", Ok(vec![V4, b])),
        (none.clone(), POOLS_V6, r#"["other"]"#, Ok(vec![V4, b])),
        (json!({"assign_ipv6": "false"}), POOLS_V6, r#"["other"]"#, Ok(vec![V4, b])),
        (none.clone(), POOLS_V6, r#"["default"]"#, Err("the other family")),
        (none.clone(), ADDRESSES, r#"["fd00:b::7", "10.0.0.99"]"#, Ok(vec![V4, b])),
        (none.clone(), ADDRESSES, r#"["fd00:a::99"]"#, Ok(vec![a])),
        (none.clone(), ADDRESSES, r#"["10.0.0.98"]"#, Ok(vec![V4])),
    ]
    .into_iter()
    .enumerate()
    {
        let (pod, container) = (format!("p{number}"), format!("c{number}"));
        bed.annotated(&pod, if annotation.is_empty() { "none" } else { annotation }, text).await;
        let mut call = bed.invocation(Command::Add, &container, &pod);
        call.config.extra.insert("ipam".to_owned(), ipam.clone());
        let case = format!("{ipam} {annotation} {text}");
        match (networks(bed.call(call).await), expected) {
            (Ok(found), Ok(expected)) => {
                assert_eq!(found, expected, "{case}");
                let endpoint = bed.endpoint(&pod, "eth0").await.unwrap();
                assert_eq!(endpoint["spec"]["ipNetworks"].as_array().unwrap().len(), expected.len());
            }
            (Err(problem), Err(expected)) => assert!(problem.contains(expected), "{case}: {problem}"),
            (found, _) => panic!("{case}: {found:?}"),
        }
        bed.call(bed.invocation(Command::Del, &container, &pod)).await.unwrap();
    }
    assert_eq!(bed.allocated().await, Vec::<String>::new());
}

/// The configuration of the runtime names no families then, so nothing has to be written or started again.
#[tokio::test(flavor = "multi_thread")]
async fn a_running_agent_follows_pools_of_the_other_family() {
    const BOTH: [&str; 2] = ["10.0.0.0/16", "fd00:a::/48"];
    let bed = Bed::new().await;
    bed.os.lock().has_ipv6 = true;
    bed.annotated("p", "none", "").await;
    let is_given = async |expected: &[&str]| {
        let found = networks(bed.add("c", "p").await).unwrap();
        bed.call(bed.invocation(Command::Del, "c", "p")).await.unwrap();
        found == expected
    };
    assert!(is_given(&BOTH[..1]).await);
    bed.pool("six", json!({"cidr": "fd00:a::/64", "nodeSelector": "all()"})).await;
    until("addresses of both families", || is_given(&BOTH)).await;
    bed.store.delete(&Key::global(Kind::IpPool, "six"), None).await.unwrap();
    until("IPv4 addresses only", || is_given(&BOTH[..1])).await;
}

/// Labels of zones come from the controllers of a cloud when the agent runs already.
#[tokio::test(flavor = "multi_thread")]
async fn a_running_agent_follows_the_labels_of_its_node() {
    let bed = Bed::new().await;
    let spec = |cidr: &str, selector: &str| json!({"cidr": cidr, "blockSize": 26, "vxlanMode": "Always", "nodeSelector": selector});
    bed.pool("default", spec("10.0.0.0/24", "zone != 'a'")).await;
    bed.pool("zone-a", spec("10.98.0.0/24", "zone == 'a'")).await;
    bed.annotated("p", "none", "").await;
    let is_given = async |expected: &str| {
        let found = networks(bed.add("c", "p").await).unwrap();
        bed.call(bed.invocation(Command::Del, "c", "p")).await.unwrap();
        found == [expected]
    };
    assert!(is_given("10.0.0.0/16").await);
    let key = Key::global(Kind::Node, NODE);
    let mut node = bed.store.get(&key).await.unwrap().unwrap().value;
    for (zone, expected) in [("a", "10.98.0.0/16"), ("b", "10.0.0.0/16")] {
        node["metadata"]["labels"] = json!({"zone": zone});
        put(&*bed.store, &key, node.clone()).await;
        until("an address of the pool for the label", || is_given(expected)).await;
    }
}

/// A pod that lacks one of its addresses must not run with the other one only.
#[tokio::test(flavor = "multi_thread")]
async fn without_an_address_of_a_family_that_has_a_pool_the_add_fails() {
    let bed = Bed::new().await;
    bed.os.lock().has_ipv6 = true;
    bed.pool("six", json!({"cidr": "fd00:a::/127", "blockSize": 127, "nodeSelector": "all()"})).await;
    for number in 0..2 {
        bed.annotated(&format!("p{number}"), "none", "").await;
        bed.add(&format!("c{number}"), &format!("p{number}")).await.unwrap();
    }
    bed.annotated("p2", "none", "").await;
    let failure = bed.add("c2", "p2").await.unwrap_err();
    assert_eq!(failure.code, Code::IPAM);
    assert_eq!(bed.allocated().await.len(), 4, "a failed ADD leaves nothing");
    // CHECK and a repeated ADD know both addresses.
    let answer = bed.add("c0", "p0").await.unwrap().unwrap();
    assert_eq!(answer.ips.len(), 2);
    let mut check = bed.invocation(Command::Check, "c0", "p0");
    let mut before = answer.document("1.0.0");
    check.config.extra.insert("prevResult".to_owned(), before.clone());
    bed.call(check.clone()).await.unwrap();
    before["ips"].as_array_mut().unwrap().pop();
    check.config.extra.insert("prevResult".to_owned(), before);
    let failure = bed.call(check).await.unwrap_err();
    assert_eq!(failure.code, Code::DIFFERS);
    assert!(failure.to_string().contains("prevResult does not have its address fd00:a::"), "{failure}");
}

/// A pod that names its node avoids the scheduler, and could take the connections of another one.
#[tokio::test(flavor = "multi_thread")]
async fn a_pod_does_not_get_the_host_port_of_another() {
    let bed = Bed::new().await;
    for (pod, port) in [("z", 8080), ("a", 8080), ("b", 8081)] {
        bed.with_host_port(pod, port).await;
    }
    bed.add("cz", "z").await.unwrap();
    let failure = bed.add("ca", "a").await.unwrap_err();
    assert_eq!(failure.code, Code::TRY_AGAIN_LATER);
    assert!(failure.msg.contains("hostPort 8080/TCP of pod n/a is that of pod n/z"), "{failure:?}");
    assert_eq!(bed.allocated().await.len(), 1, "a failed ADD leaves nothing");
    bed.add("cb", "b").await.unwrap();
    bed.add("cz2", "z").await.expect("the next sandbox of the pod has its port");
    for container in ["cz", "cz2"] {
        bed.call(bed.invocation(Command::Del, container, "z")).await.unwrap();
    }
    until("the port is free", || async { bed.add("ca", "a").await.is_ok() }).await;
    // An endpoint may outlive its pod, if the runtime has forgotten it.
    bed.with_host_port("c", 8080).await;
    bed.add("cc", "c").await.unwrap_err();
    let key = pod_key("a");
    bed.store.delete(&key, None).await.unwrap();
    bed.add("cc", "c").await.unwrap();
}
