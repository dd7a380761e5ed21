//! Tables of nodes, results of plugins, and problems.

mod advertised;

use std::path::PathBuf;

use serde_json::json;
use tortie_kernel::route::NextHop;

use super::*;

fn id(pod: &str) -> EndpointId {
    EndpointId { namespace: "n".into(), pod: pod.into(), interface: "eth0".into() }
}

fn link(index: u32, name: &str) -> Link {
    Link {
        index,
        name: name.to_owned(),
        kind: "veth".to_owned(),
        mac: None,
        mtu: 1500,
        up: true,
        controller: None,
        peer: None,
        alias: String::new(),
        vxlan: None,
        carries_ipv4: false,
    }
}

fn to(net: &str, link: u32) -> Route {
    Route::on_link(net.parse().unwrap(), link, 3)
}

fn pods(pods: &[(&str, &[&str])]) -> BTreeMap<EndpointId, Arc<Endpoint>> {
    let pod = |(name, addresses): &(&str, &[&str])| {
        let endpoint = Endpoint {
            container_id: "".into(),
            host_interface: "cali0".into(),
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            mac: None,
            host_ports: [].into(),
            program: Arc::default(),
        };
        (id(name), Arc::new(endpoint))
    };
    pods.iter().map(pod).collect()
}

/// What ptp has answered for a pod.
fn result(pod: &str, host_interface: &str, addresses: &[&str]) -> KeptResult {
    let ips: Vec<_> =
        addresses.iter().map(|address| json!({"address": format!("{address}/24"), "interface": 1})).collect();
    let file = json!({
        "kind": "cniCacheV1", "containerId": "c", "config": "e30=", "ifName": "eth0", "networkName": "net",
        "cniArgs": [["IgnoreUnknown", "1"], ["K8S_POD_NAMESPACE", "n"], ["K8S_POD_NAME", pod]],
        "result": {
            "cniVersion": "1.0.0", "ips": ips,
            "interfaces": [{"name": host_interface}, {"name": "eth0", "sandbox": "/run/netns/x"}, {"name": "eth0"}],
        },
    });
    KeptResult::parse(file.to_string().as_bytes()).unwrap()
}

fn config() -> PolicyOnly {
    PolicyOnly { prefixes: vec!["eni".to_owned(), "gke".to_owned()], results: PathBuf::from("/results") }
}

/// A table of nodes: links, routes and results of plugins; pods; and the expected interfaces, problems and closed interfaces.
#[test]
fn an_interface_is_a_pods_only_if_route_and_name_or_result_say_so() {
    const A: &str = "10.0.0.1";
    const A_6: &str = "fd00::1";
    // printf n.a | sha1sum
    let hashed = format!("eni{}", digits("n", "a"));
    assert_eq!(digits("default", "mypod"), "4e199eba087", "Calico's own example");
    let bridged = Link { controller: Some(9), ..link(2, "veth1") };
    let bridge = Link { kind: "bridge".to_owned(), ..link(9, "cni0") };
    let to_a = || vec![to("10.0.0.1/32", 2)];
    let of_other = |name: &str, owner: Option<&str>| Problem::OfAnother {
        interface: name.to_owned(),
        owner: owner.map(str::to_owned),
    };
    let no_route = |address: &str, closed: Option<&str>| Problem::NoRoute {
        address: address.parse().unwrap(),
        closed: closed.map(str::to_owned),
    };
    let unfit = |name: &str| Problem::Unfit { address: A.parse().unwrap(), interface: name.to_owned() };
    let with_networks =
        || Problem::WithNetworks { address: A.parse().unwrap(), interface: "veth1".to_owned() };
    let a = || pods(&[("a", &[A])]);
    type Case = (
        &'static str,
        Vec<Link>,
        Vec<Route>,
        Vec<KeptResult>,
        BTreeMap<EndpointId, Arc<Endpoint>>,
        Vec<(&'static str, Result<String, Problem>)>,
        Vec<&'static str>,
    );
    let yes = |name: &str| Ok(name.to_owned());
    let table: Vec<Case> = vec![
        (
            "route and result",
            vec![link(2, "veth1")],
            to_a(),
            vec![result("a", "veth1", &[A])],
            a(),
            vec![("a", yes("veth1"))],
            vec![],
        ),
        (
            "route and hash",
            vec![link(2, &hashed)],
            to_a(),
            vec![],
            a(),
            vec![("a", Ok(hashed.clone()))],
            vec![],
        ),
        (
            "route alone",
            vec![link(2, "veth1")],
            to_a(),
            vec![],
            a(),
            vec![("a", Err(Problem::Unproven("veth1".to_owned())))],
            vec!["veth1"],
        ),
        (
            "result alone",
            vec![link(2, "veth1")],
            vec![],
            vec![result("a", "veth1", &[A])],
            a(),
            vec![("a", Err(no_route(A, Some("veth1"))))],
            vec!["veth1"],
        ),
        (
            "no link",
            vec![],
            to_a(),
            vec![result("a", "veth1", &[A])],
            a(),
            vec![("a", Err(no_route(A, None)))],
            vec![],
        ),
        (
            "the hash of another pod",
            vec![link(2, "eni0123456789a")],
            to_a(),
            vec![],
            a(),
            vec![("a", Err(of_other("eni0123456789a", None)))],
            vec!["eni0123456789a"],
        ),
        (
            "a prefix without hash",
            vec![link(2, "eni1")],
            to_a(),
            vec![],
            a(),
            vec![("a", Err(Problem::Unproven("eni1".to_owned())))],
            vec!["eni1"],
        ),
        (
            "the next pod has the address, and the API does not say so yet",
            vec![link(3, "veth2")],
            vec![to("10.0.0.1/32", 3)],
            vec![result("a", "veth1", &[A]), result("b", "veth2", &[A])],
            a(),
            vec![("a", Err(of_other("veth2", Some("n/b"))))],
            vec!["veth2"],
        ),
        (
            "both claim the address, and one has it",
            vec![link(3, "veth2")],
            vec![to("10.0.0.1/32", 3)],
            vec![result("b", "veth2", &[A])],
            pods(&[("a", &[A]), ("b", &[A])]),
            vec![("a", Err(of_other("veth2", Some("n/b")))), ("b", yes("veth2"))],
            vec![],
        ),
        (
            "both claim the address, and none proves it",
            vec![link(3, "veth2")],
            vec![to("10.0.0.1/32", 3)],
            vec![],
            pods(&[("a", &[A]), ("b", &[A])]),
            vec![
                ("a", Err(Problem::Unproven("veth2".to_owned()))),
                ("b", Err(Problem::Unproven("veth2".to_owned()))),
            ],
            vec!["veth2"],
        ),
        (
            "the result has another address",
            vec![link(2, "veth1")],
            to_a(),
            vec![result("a", "veth1", &["10.0.0.2"])],
            a(),
            vec![("a", Err(Problem::Unproven("veth1".to_owned())))],
            vec!["veth1"],
        ),
        (
            "results of two pods name the interface",
            vec![link(2, "veth1")],
            to_a(),
            vec![result("a", "veth1", &[A]), result("b", "veth1", &[A])],
            a(),
            vec![("a", Err(of_other("veth1", Some("n/b"))))],
            vec!["veth1"],
        ),
        (
            "a sandbox of before has the same interface",
            vec![link(2, "veth1")],
            to_a(),
            vec![result("a", "veth1", &["10.0.0.9"]), result("a", "veth1", &[A])],
            a(),
            vec![("a", yes("veth1"))],
            vec![],
        ),
        (
            "a pod that is not in the API yet",
            vec![link(2, "veth1")],
            to_a(),
            vec![result("a", "veth1", &[A])],
            pods(&[]),
            vec![],
            vec!["veth1"],
        ),
        (
            "a bridge",
            vec![bridged.clone(), bridge.clone()],
            vec![to("10.0.0.0/24", 9)],
            vec![result("a", "veth1", &[A])],
            a(),
            vec![("a", Err(Problem::Bridged { interface: "veth1".to_owned(), bridge: "cni0".to_owned() }))],
            vec![],
        ),
        (
            "a pod's interface with a network",
            vec![link(2, "veth1")],
            vec![to("10.0.0.1/32", 2), Route::on_link("192.0.2.0/24".parse().unwrap(), 2, 2)],
            vec![result("a", "veth1", &[A])],
            a(),
            vec![("a", Err(with_networks()))],
            vec!["veth1"],
        ),
        (
            "a pod's interface to which a router advertisement leads",
            vec![link(2, "veth1")],
            vec![to("10.0.0.1/32", 2), Route::via("::/0".parse().unwrap(), "fe80::1".parse().unwrap(), 2, 9)],
            vec![result("a", "veth1", &[A])],
            a(),
            vec![("a", Err(with_networks()))],
            vec!["veth1"],
        ),
        (
            "an interface with a network, of a pod that is not in the API yet",
            vec![link(2, "veth1")],
            vec![to("10.0.0.1/32", 2), Route::on_link("192.0.2.0/24".parse().unwrap(), 2, 2)],
            vec![result("a", "veth1", &[A])],
            pods(&[]),
            vec![],
            vec!["veth1"],
        ),
        (
            "one family has no route, and the interface has a network",
            vec![link(2, "veth1")],
            vec![to("10.0.0.1/32", 2), Route::on_link("192.0.2.0/24".parse().unwrap(), 2, 2)],
            vec![result("a", "veth1", &[A, A_6])],
            pods(&[("a", &[A, A_6])]),
            vec![("a", Err(no_route(A_6, Some("veth1"))))],
            vec!["veth1"],
        ),
        (
            "a link of another kind",
            vec![Link { kind: "vlan".to_owned(), ..link(2, "veth1") }],
            to_a(),
            vec![result("a", "veth1", &[A])],
            a(),
            vec![("a", Err(unfit("veth1")))],
            vec![],
        ),
        (
            "networks by way of the pod do not make its interface the node's own",
            vec![link(2, "veth1")],
            vec![to("10.0.0.1/32", 2), to("10.50.0.0/16", 2)],
            vec![result("a", "veth1", &[A])],
            a(),
            vec![("a", yes("veth1"))],
            vec![],
        ),
        (
            "the node's own adapter is a veth, too",
            vec![link(2, "veth1")],
            vec![to("10.0.0.1/32", 2), to("0.0.0.0/0", 2)],
            vec![],
            a(),
            vec![("a", Err(unfit("veth1")))],
            vec![],
        ),
        (
            "networks by way of an interface that the API does not know yet",
            vec![link(2, "veth1")],
            vec![to("10.0.0.1/32", 2), to("10.50.0.0/16", 2)],
            vec![result("b", "veth1", &[A])],
            a(),
            vec![("a", Err(of_other("veth1", Some("n/b"))))],
            vec!["veth1"],
        ),
        (
            "a second interface of the pod",
            vec![link(2, "veth1"), link(3, "veth2")],
            to_a(),
            vec![result("a", "veth1", &[A]), result("a", "veth2", &[])],
            a(),
            vec![("a", yes("veth1"))],
            vec!["veth2"],
        ),
        (
            "a gateway",
            vec![link(2, "veth1")],
            vec![Route::via("10.0.0.1/32".parse().unwrap(), "192.0.2.1".parse().unwrap(), 2, 3)],
            vec![],
            a(),
            vec![("a", Err(no_route(A, None)))],
            vec![],
        ),
        (
            "a blackhole",
            vec![link(2, "veth1")],
            vec![Route::blackhole("10.0.0.1/32".parse().unwrap(), 3)],
            vec![],
            a(),
            vec![("a", Err(no_route(A, None)))],
            vec![],
        ),
        (
            "two families",
            vec![link(2, "veth1")],
            vec![to("10.0.0.1/32", 2), to("fd00::1/128", 2), to("fe80::/64", 2)],
            vec![result("a", "veth1", &[A, A_6])],
            pods(&[("a", &[A, A_6])]),
            vec![("a", yes("veth1"))],
            vec![],
        ),
        (
            "one family has no route",
            vec![link(2, "veth1")],
            to_a(),
            vec![result("a", "veth1", &[A, A_6])],
            pods(&[("a", &[A, A_6])]),
            vec![("a", Err(no_route(A_6, Some("veth1"))))],
            vec!["veth1"],
        ),
        (
            "the families lead to two links",
            vec![link(2, "veth1"), link(3, "veth2")],
            vec![to("10.0.0.1/32", 2), to("fd00::1/128", 3)],
            vec![result("a", "veth1", &[A, A_6])],
            pods(&[("a", &[A, A_6])]),
            vec![("a", Err(Problem::Several(["veth1".to_owned(), "veth2".to_owned()].into())))],
            vec!["veth1", "veth2"],
        ),
        (
            "routes of two metrics lead to two links",
            vec![link(2, "veth1"), link(3, "veth2")],
            vec![to("10.0.0.1/32", 2), Route { metric: 9, ..to("10.0.0.1/32", 3) }],
            vec![result("a", "veth1", &[A])],
            a(),
            vec![("a", Err(Problem::Several(["veth1".to_owned(), "veth2".to_owned()].into())))],
            vec!["veth1", "veth2"],
        ),
        (
            "two next hops",
            vec![link(2, "veth1"), link(3, "veth2")],
            vec![Route {
                others: vec![NextHop { link: 3, gateway: None, onlink: false }],
                ..to("10.0.0.1/32", 2)
            }],
            vec![result("a", "veth1", &[A])],
            a(),
            vec![("a", Err(Problem::Several(["veth1".to_owned(), "veth2".to_owned()].into())))],
            vec!["veth1", "veth2"],
        ),
    ];
    for (what, links, routes, attachments, pods, expected, unclaimed) in table {
        let found = Observed::new(links, &routes, attachments).recognise(&pods, &config());
        let mut both: BTreeMap<EndpointId, Result<String, Problem>> = BTreeMap::new();
        both.extend(found.interfaces.iter().map(|(id, name)| (id.clone(), Ok(name.to_string()))));
        both.extend(found.problems.iter().map(|(id, problem)| (id.clone(), Err(problem.clone()))));
        let expected: BTreeMap<_, _> = expected.into_iter().map(|(pod, found)| (id(pod), found)).collect();
        assert_eq!(both, expected, "{what}");
        let unclaimed: BTreeSet<String> = unclaimed.into_iter().map(str::to_owned).collect();
        assert_eq!(found.unclaimed, unclaimed, "{what}");
    }
}

/// In nested nodes the adapter is a veth, too, and plugins may name it: as the parent of a pod's interface, without a sandbox.
#[test]
fn the_nodes_own_adapter_is_never_closed() {
    const POD: &str = "192.0.2.9";
    let network = || Route::on_link("192.0.2.0/24".parse().unwrap(), 2, 2);
    let default = || Route::via("0.0.0.0/0".parse().unwrap(), "192.0.2.1".parse().unwrap(), 2, 3);
    let by_gateway = || Route::via("192.0.2.9/32".parse().unwrap(), "192.0.2.1".parse().unwrap(), 2, 3);
    let of_address = || Route::on_link("192.0.2.9/32".parse().unwrap(), 2, 2);
    let named = || vec![result("a", "eth1", &[POD])];
    let mut other_address = named();
    other_address[0].addresses = ["192.0.2.8".parse().unwrap()].into();
    let mut both = result("a", "veth3", &[POD]);
    both.host_interfaces.push("eth1".to_owned());
    let is_adapter = || BTreeSet::from([2]);
    type Case = (&'static str, Vec<Route>, Vec<KeptResult>, BTreeSet<u32>);
    let table: [Case; 7] = [
        ("the node's address", vec![network(), default(), to("192.0.2.9/32", 2)], named(), is_adapter()),
        ("another adapter", vec![network()], named(), BTreeSet::new()),
        ("a default route alone", vec![default()], named(), BTreeSet::new()),
        ("a route by a router", vec![network(), by_gateway()], named(), BTreeSet::new()),
        ("the kernel's route", vec![network(), of_address()], named(), BTreeSet::new()),
        (
            "a route to another address",
            vec![network(), to("192.0.2.9/32", 2)],
            other_address,
            BTreeSet::new(),
        ),
        ("a pod beside", vec![network(), to("192.0.2.9/32", 3)], vec![both], BTreeSet::new()),
    ];
    for (what, routes, results, adapters) in table {
        let links = vec![link(2, "eth1"), link(3, "veth3")];
        let observed = Observed { adapters, ..Observed::new(links, &routes, results) };
        let found = observed.recognise(&pods(&[("a", &[POD])]), &config());
        assert_eq!(found.unclaimed, BTreeSet::new(), "{what}");
    }
}

/// Packets may have passed an interface before the look that closes it, so what began then must not go on.
#[test]
fn the_addresses_behind_an_interface_are_newly_closed_once() {
    const OPEN: &[&str] = &["10.0.0.1"];
    let look = |index, routes: &[Route], pod, claims: &[(&str, &[&str])]| {
        let results = vec![result(pod, "veth1", &["10.0.0.1", "10.0.0.2"])];
        Observed::new(vec![link(index, "veth1")], routes, results).recognise(&pods(claims), &config())
    };
    let addresses =
        |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<BTreeSet<IpAddr>>();
    let nothing = Recognised::default();
    // The result is another pod's than the one that has the address in the API.
    let closed = look(2, &[to("10.0.0.1/32", 2), to("10.0.0.9/32", 2)], "next", &[("before", OPEN)]);
    assert_eq!(nothing.newly_closed(&closed), addresses(&["10.0.0.1", "10.0.0.2", "10.0.0.9"]));
    assert_eq!(closed.newly_closed(&closed), addresses(&[]));
    let next_interface = look(3, &[to("10.0.0.1/32", 3)], "next", &[("before", OPEN)]);
    assert_eq!(
        closed.newly_closed(&next_interface),
        addresses(&["10.0.0.1", "10.0.0.2"]),
        "the name is the same"
    );
    let known = look(2, &[to("10.0.0.1/32", 2)], "before", &[("before", OPEN)]);
    assert_eq!(nothing.newly_closed(&known), addresses(&[]));
}

/// Nothing of a pod with policy passes its closed further interface, and the node's own address is on many interfaces.
#[test]
fn addresses_of_recognised_pods_and_of_the_node_are_behind_no_closed_interface() {
    const A: &str = "10.0.0.1";
    let links = || vec![link(2, "veth1"), link(3, "veth2")];
    let closed = |links, routes: &[Route], results| {
        let found = Observed::new(links, routes, results).recognise(&pods(&[("a", &[A])]), &config());
        assert_eq!(found.unclaimed, BTreeSet::from(["veth2".to_owned()]));
        Recognised::default().newly_closed(&found)
    };
    // AWS VPC CNI with ENABLE_V4_EGRESS: one result names both interfaces.
    let mut both = result("a", "veth1", &[A]);
    both.host_interfaces.push("veth2".to_owned());
    assert_eq!(closed(links(), &[to("10.0.0.1/32", 2)], vec![both]), BTreeSet::new());
    // ptp: the kernel makes a route to the gateway's address of each interface. The second pod is not in the API yet.
    let of_gateway = |link| Route::on_link("fd00:9::1/128".parse().unwrap(), link, 2);
    let routes = [to("10.0.0.1/32", 2), of_gateway(2), to("fd00:9::2/128", 3), of_gateway(3)];
    let results = vec![result("a", "veth1", &[A]), result("b", "veth2", &["fd00:9::2"])];
    assert_eq!(closed(links(), &routes, results), BTreeSet::from(["fd00:9::2".parse().unwrap()]));
}

/// Each problem has its own message, which names what to do.
#[test]
fn problems_name_the_interface_and_the_remedy() {
    let results = Path::new("/results");
    let name = || "veth1".to_owned();
    for (problem, reason, parts) in [
        (
            Problem::NoRoute { address: "10.0.0.1".parse().unwrap(), closed: None },
            Reason::InterfaceMissing,
            ["10.0.0.1", "waits for the CNI plugin"],
        ),
        (
            Problem::NoRoute { address: "10.0.0.1".parse().unwrap(), closed: Some(name()) },
            Reason::InterfaceMissing,
            ["veth1 is closed", "POD_SECURITY_GROUP_ENFORCING_MODE"],
        ),
        (
            Problem::Bridged { interface: name(), bridge: "cni0".to_owned() },
            Reason::InterfaceMissing,
            ["cni0", "use a plugin"],
        ),
        (
            Problem::Several([name(), "veth2".to_owned()].into()),
            Reason::InterfaceUnproven,
            ["veth1, veth2", "Delete the wrong routes"],
        ),
        (
            Problem::Unfit { address: "10.0.0.1".parse().unwrap(), interface: name() },
            Reason::InterfaceMissing,
            ["veth1", "use a plugin"],
        ),
        (
            Problem::WithNetworks { address: "10.0.0.1".parse().unwrap(), interface: name() },
            Reason::InterfaceUnproven,
            ["veth1 is closed", "accept_ra"],
        ),
        (
            Problem::OfAnother { interface: name(), owner: Some("n/b".to_owned()) },
            Reason::InterfaceUnproven,
            ["n/b", "delete that pod"],
        ),
        (
            Problem::OfAnother { interface: name(), owner: None },
            Reason::InterfaceUnproven,
            ["another pod", "delete that pod"],
        ),
        (Problem::Unproven(name()), Reason::InterfaceUnproven, ["/results", "--pod-interface-prefix"]),
    ] {
        let condition = problem.condition(results);
        assert_eq!(condition.reason, reason, "{condition}");
        assert!(parts.iter().all(|part| condition.message.contains(part)), "{condition}");
    }
}

/// The interface that has policy is named, and those that are closed.
#[test]
fn further_interfaces_of_a_pod_are_reported() {
    let links = vec![link(2, "veth1"), link(3, "veth2"), link(4, "veth3")];
    let results =
        vec![result("a", "veth1", &["10.0.0.1"]), result("a", "veth2", &[]), result("b", "veth3", &[])];
    let found = Observed::new(links, &[to("10.0.0.1/32", 2)], results)
        .recognise(&pods(&[("a", &["10.0.0.1"])]), &config());
    let further = BTreeSet::from(["veth2".to_owned()]);
    assert_eq!(found.further, BTreeMap::from([(id("a"), further.clone())]));
    let condition = further_closed("veth1", &further);
    assert!(
        condition.message.contains("(veth2)") && condition.message.contains("on veth1 only"),
        "{condition}"
    );
}

/// A new interface with the name of the one before is another interface.
#[test]
fn pods_whose_interface_has_another_index_have_moved() {
    let at = |index: u32, name: &str| {
        let observed = Observed::new(
            vec![link(index, name)],
            &[to("10.0.0.1/32", index)],
            vec![result("a", name, &["10.0.0.1"])],
        );
        observed.recognise(&pods(&[("a", &["10.0.0.1"])]), &config())
    };
    let none = Recognised::default();
    for (before, after, moved) in [
        (at(2, "veth1"), at(2, "veth1"), false),
        (at(2, "veth1"), at(3, "veth1"), true),
        (none.clone(), at(2, "veth1"), true),
        (at(2, "veth1"), none, true),
    ] {
        assert_eq!(!before.moved(&after).is_empty(), moved, "{before:?} {after:?}");
    }
}

#[test]
fn a_prefix_of_the_nodes_own_interfaces_is_found() {
    let physical = |name: &str| Link { kind: String::new(), ..link(7, name) };
    let default = [to("0.0.0.0/0", 7), to("10.0.0.1/32", 2)];
    for (links, prefixes, expected) in [
        (vec![link(2, "eni1"), physical("eth0")], ["eni", "gke"], None),
        (vec![link(2, "eni1"), physical("eth0")], ["eni", "e"], Some(("e", "eth0"))),
        (vec![link(2, "eni1"), link(7, "eth0")], ["eni", "et"], Some(("et", "eth0"))),
        (vec![link(2, "eth1")], ["eni", "et"], None),
    ] {
        let prefixes = prefixes.map(str::to_owned);
        let expected = expected.map(|(prefix, name)| (prefix.to_owned(), name.to_owned()));
        assert_eq!(prefix_of_node(&prefixes, links.clone(), &default), expected, "{links:?}");
    }
}
