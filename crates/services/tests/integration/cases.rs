//! Single cases, by tables. Each is a Service and its endpoints in short, and the destinations of a packet in words.

use serde_json::{Value, json};
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind};
use tortie_services::{
    Affinities, FrontendAddress, FrontendKind, KINDS, NodePortAddresses, NodePortPlace, Sender, Services,
};

use crate::setting::{
    NODE, NODE_ITSELF, OTHER, POD, endpoint, problems, put, put_node, put_slice, sent, sent_by, service,
    services, slice,
};

/// Each row of the table of destinations, for the clusterIP and for the three external kinds.
#[test]
fn policies_choose_backends_and_the_source() {
    let both = json!([endpoint("10.0.0.1", "n1", "rs"), endpoint("10.0.0.2", "n2", "rs")]);
    let far = json!([endpoint("10.0.0.2", "n2", "rs")]);
    let none = json!([endpoint("10.0.0.2", "n2", "")]);
    let local = json!({"externalTrafficPolicy": "Local", "internalTrafficPolicy": "Local"});
    let all = "10.0.0.1:8080 10.0.0.2:8080";
    let masqueraded = "10.0.0.1:8080! 10.0.0.2:8080!";
    for (policy, endpoints, inside, outside) in [
        (json!({}), &both, [all, masqueraded, masqueraded], [masqueraded; 3]),
        (json!({}), &far, ["10.0.0.2:8080", "10.0.0.2:8080!", "10.0.0.2:8080!"], ["10.0.0.2:8080!"; 3]),
        (json!({}), &none, ["rejected"; 3], ["rejected"; 3]),
        (
            local.clone(),
            &both,
            ["10.0.0.1:8080", "10.0.0.1:8080!", "10.0.0.1:8080!"],
            [all, masqueraded, "10.0.0.1:8080"],
        ),
        (local.clone(), &far, ["dropped"; 3], ["10.0.0.2:8080", "10.0.0.2:8080!", "dropped"]),
        (local, &none, ["rejected"; 3], ["rejected"; 3]),
    ] {
        let mut services = services();
        let mut value = service(policy);
        value["spec"]["externalIPs"] = json!(["198.51.100.7"]);
        value["status"] = json!({"loadBalancer": {"ingress": [{"ip": "198.51.100.8"}]}});
        put(&mut services, "s", &value);
        put_slice(&mut services, "s-1", &slice(endpoints.clone()));
        let mut ask = |to, port| [POD, NODE_ITSELF, OTHER].map(|from| sent(&mut services, from, to, port));
        assert_eq!(ask("10.96.0.1", 80), inside, "{value} {endpoints}");
        for (to, port) in [("198.51.100.7", 80), ("198.51.100.8", 80), ("192.0.2.1", 30_080)] {
            assert_eq!(ask(to, port), outside, "{to} {value} {endpoints}");
        }
        assert_eq!(problems(&services), Vec::<String>::new());
    }
}

/// The external policy counts only for Services with external addresses, and neither policy for the other's addresses.
#[test]
fn a_policy_concerns_its_own_addresses() {
    let far = json!([endpoint("10.0.0.2", "n2", "rs")]);
    for (spec, to, port, expected) in [
        (json!({"externalTrafficPolicy": "Local"}), "10.96.0.1", 80, "10.0.0.2:8080!"),
        (json!({"internalTrafficPolicy": "Local"}), "192.0.2.1", 30_080, "10.0.0.2:8080!"),
        // A node port without such a type is left over from another one.
        (
            json!({"externalTrafficPolicy": "Local", "type": "ClusterIP"}),
            "192.0.2.1",
            30_080,
            "10.0.0.2:8080!",
        ),
        (
            json!({"externalTrafficPolicy": "Local", "type": "ClusterIP", "externalIPs": ["198.51.100.7"]}),
            "192.0.2.1",
            30_080,
            "dropped",
        ),
    ] {
        let mut services = services();
        put(&mut services, "s", &service(spec.clone()));
        put_slice(&mut services, "s-1", &slice(far.clone()));
        assert_eq!(sent(&mut services, OTHER, to, port), expected, "{spec}");
    }
}

/// Endpoints that end stand in for ready ones in each pool by itself; hints concern the ready ones of the cluster's pool.
#[test]
fn each_pool_has_its_own_fallback_and_hints() {
    let hinted = |endpoint: Value, zones: &[&str], nodes: &[&str]| {
        let named = |names: &[&str]| names.iter().map(|name| json!({"name": name})).collect::<Vec<_>>();
        let mut endpoint = endpoint;
        endpoint["hints"] = json!({"forZones": named(zones), "forNodes": named(nodes)});
        endpoint
    };
    let (here, far) = (|state| endpoint("10.0.0.1", "n1", state), |state| endpoint("10.0.0.2", "n2", state));
    let both = "10.0.0.1:8080 10.0.0.2:8080";
    for (endpoints, cluster, local) in [
        (json!([here("st"), far("rs")]), "10.0.0.2:8080", "10.0.0.1:8080"),
        (json!([here("rs"), far("st")]), "10.0.0.1:8080", "10.0.0.1:8080"),
        (json!([here("st"), far("st")]), both, "10.0.0.1:8080"),
        (json!([here("s"), far("t")]), "rejected", "rejected"),
        (json!([here("t"), far("rs")]), "10.0.0.2:8080", "dropped"),
        // Without conditions, an endpoint is ready.
        (json!([{"addresses": ["10.0.0.1"], "nodeName": "n1"}]), "10.0.0.1:8080", "10.0.0.1:8080"),
        // An endpoint that does not say that it serves does.
        (
            json!([{"addresses": ["10.0.0.1"], "nodeName": "n1", "conditions": {"ready": false, "terminating": true}}]),
            "10.0.0.1:8080",
            "10.0.0.1:8080",
        ),
        (
            json!([hinted(here("rs"), &["b"], &[]), hinted(far("rs"), &["a"], &[])]),
            "10.0.0.2:8080",
            "10.0.0.1:8080",
        ),
        (json!([hinted(here("rs"), &["b"], &[]), hinted(far("rs"), &["c"], &[])]), both, "10.0.0.1:8080"),
        (json!([hinted(here("rs"), &[], &[]), hinted(far("rs"), &["a"], &[])]), both, "10.0.0.1:8080"),
        (
            json!([hinted(here("rs"), &["a"], &["n2"]), hinted(far("rs"), &["b"], &["n1"])]),
            "10.0.0.2:8080",
            "10.0.0.1:8080",
        ),
        (
            json!([hinted(here("rs"), &["a"], &["n2"]), hinted(far("rs"), &["b"], &[])]),
            "10.0.0.1:8080",
            "10.0.0.1:8080",
        ),
        // An endpoint that is not ready disables nothing.
        (
            json!([
                hinted(here("rs"), &["b"], &[]),
                hinted(far("rs"), &["a"], &[]),
                endpoint("10.0.0.3", "n2", "st")
            ]),
            "10.0.0.2:8080",
            "10.0.0.1:8080",
        ),
        (json!([hinted(here("st"), &["b"], &[]), hinted(far("st"), &["a"], &[])]), both, "10.0.0.1:8080"),
    ] {
        for (policy, expected) in [("Cluster", cluster), ("Local", local)] {
            let mut services = services();
            put(&mut services, "s", &service(json!({"internalTrafficPolicy": policy})));
            put_slice(&mut services, "s-1", &slice(endpoints.clone()));
            assert_eq!(sent(&mut services, POD, "10.96.0.1", 80), expected, "{policy} {endpoints}");
        }
    }
}

/// The zone of the node decides again when its label changes, and without a label no zone is preferred.
#[test]
fn a_changed_zone_chooses_again() {
    let zoned =
        |address: &str, zone: &str| json!({"addresses": [address], "hints": {"forZones": [{"name": zone}]}});
    let mut services = services();
    put(&mut services, "s", &service(json!({})));
    put_slice(&mut services, "s-1", &slice(json!([zoned("10.0.0.1", "a"), zoned("10.0.0.2", "b")])));
    for (labels, expected) in [
        (json!({"topology.kubernetes.io/zone": "a"}), "10.0.0.1:8080"),
        (json!({"topology.kubernetes.io/zone": "b"}), "10.0.0.2:8080"),
        (json!({"topology.kubernetes.io/zone": ""}), "10.0.0.1:8080 10.0.0.2:8080"),
        (json!({}), "10.0.0.1:8080 10.0.0.2:8080"),
    ] {
        put_node(&mut services, labels.clone(), json!([]));
        assert_eq!(sent(&mut services, POD, "10.96.0.1", 80), expected, "{labels}");
    }
}

#[test]
fn slices_are_joined_by_name_family_and_protocol() {
    let one = |ports: Value| json!({"addressType": "IPv4", "endpoints": [{"addresses": ["10.0.0.1", "10.0.0.9"]}], "ports": ports});
    let with_labels = |labels: Value| {
        let mut value = one(json!([{"name": "", "port": 8080}]));
        value["metadata"]["labels"] = labels;
        value
    };
    let mut of_fqdn = one(json!([{"name": "", "port": 8080}]));
    of_fqdn["addressType"] = json!("FQDN");
    let mut other_family = one(json!([{"name": "", "port": 8080}]));
    other_family["addressType"] = json!("IPv6");
    for (slice, expected) in [
        (one(json!([{"name": "", "port": 8080}])), "10.0.0.1:8080"),
        (one(json!([{"name": "", "port": 8080, "protocol": "TCP"}])), "10.0.0.1:8080"),
        (one(json!([{"port": 8080}])), "rejected"),
        (one(json!([{"name": ""}])), "rejected"),
        (one(json!([{"name": "", "port": 0}])), "rejected"),
        (one(json!([{"name": "http", "port": 8080}])), "rejected"),
        (one(json!([{"name": "", "port": 8080, "protocol": "UDP"}])), "rejected"),
        (of_fqdn, "rejected"),
        (other_family, "rejected"),
        (with_labels(json!({"kubernetes.io/service-name": "t"})), "rejected"),
        (
            with_labels(json!({"kubernetes.io/service-name": "s", "service.kubernetes.io/headless": ""})),
            "rejected",
        ),
        (with_labels(json!({})), "rejected"),
    ] {
        let mut services = services();
        put(&mut services, "s", &service(json!({})));
        put_slice(&mut services, "s-1", &slice);
        assert_eq!(sent(&mut services, POD, "10.96.0.1", 80), expected, "{slice}");
    }
}

/// Several slices: other numbers under one name, and one address in two slices.
#[test]
fn slices_of_a_service_are_merged() {
    let mut services = services();
    put(&mut services, "s", &service(json!({})));
    put_slice(&mut services, "s-1", &slice(json!([endpoint("10.0.0.1", "n1", "rs")])));
    let mut other = slice(json!([endpoint("10.0.0.1", "n1", "rs"), endpoint("10.0.0.2", "n2", "rs")]));
    other["ports"][0]["port"] = json!(9090);
    put_slice(&mut services, "s-2", &other);
    assert_eq!(sent(&mut services, POD, "10.96.0.1", 80), "10.0.0.1:8080 10.0.0.1:9090 10.0.0.2:9090");
    // A pod ends, and another one gets its address.
    put_slice(&mut services, "s-2", &slice(json!([endpoint("10.0.0.1", "n1", "st")])));
    assert_eq!(sent(&mut services, POD, "10.96.0.1", 80), "10.0.0.1:8080");
    services.update(&Key::namespaced(Kind::EndpointSlice, "ns", "s-2"), None);
    assert_eq!(sent(&mut services, POD, "10.96.0.1", 80), "10.0.0.1:8080");
    let entries = json!([endpoint("10.0.0.1", "n1", "st"), endpoint("10.0.0.3", "n1", "rs")]);
    put_slice(&mut services, "s-0", &slice(entries));
    let both = "10.0.0.1:8080 10.0.0.3:8080";
    assert_eq!(sent(&mut services, POD, "10.96.0.1", 80), both, "the entry of the new pod counts");
    services.update(&Key::namespaced(Kind::EndpointSlice, "ns", "s-1"), None);
    assert_eq!(sent(&mut services, POD, "10.96.0.1", 80), "10.0.0.3:8080");
    // A slice that moves to another Service leaves this one.
    let mut moved = slice(json!([endpoint("10.0.0.1", "n1", "rs")]));
    moved["metadata"]["labels"] = json!({"kubernetes.io/service-name": "t"});
    put_slice(&mut services, "s-0", &moved);
    assert_eq!(sent(&mut services, POD, "10.96.0.1", 80), "rejected");
}

/// Services that nodes do not translate, and labels that hide them later.
#[test]
fn some_services_are_not_translated() {
    let mut services = services();
    services.update(
        &Key::global(Kind::ServiceCidr, "kubernetes"),
        Some(&json!({"spec": {"cidrs": ["10.96.0.0/16", "fd96::/112"]}})),
    );
    put_slice(&mut services, "s-1", &slice(json!([endpoint("10.0.0.1", "n1", "rs")])));
    let mut hidden = service(json!({}));
    hidden["metadata"]["labels"] = json!({"service.kubernetes.io/service-proxy-name": ""});
    for other in [
        service(json!({"clusterIP": "None"})),
        service(json!({"clusterIP": ""})),
        service(json!({"clusterIP": null})),
        service(json!({"type": "ExternalName"})),
        service(json!({"clusterIP": "fd96::1"})),
        hidden,
    ] {
        put(&mut services, "s", &service(json!({})));
        assert_eq!(sent(&mut services, POD, "10.96.0.1", 80), "10.0.0.1:8080");
        put(&mut services, "s", &other);
        assert_eq!(sent(&mut services, POD, "10.96.0.1", 80), "dropped", "{other}");
        let expected = if other["spec"]["clusterIP"] == "fd96::1" { "rejected" } else { "untouched" };
        let from = (Sender::Other, "2001:db8:f::5");
        assert_eq!(sent(&mut services, from, "2001:db8::1", 30_080), expected, "{other}");
    }
    services.update(&Key::namespaced(Kind::Service, "ns", "s"), None);
    services.flush().unwrap();
    assert!(
        services.state().ports.is_empty() && services.state().frontends.is_empty(),
        "{:?}",
        services.state()
    );
}

/// Addresses with zeros lead to the usual form, and a Service has its addresses of both families.
#[test]
fn addresses_are_used_in_their_usual_form() {
    let mut services = services();
    let mut value = service(json!({
        "clusterIP": "010.096.000.001", "clusterIPs": ["010.096.000.001", "FD96:0::0001"], "externalIPs": ["198.051.100.007"]}));
    value["status"] = json!({"loadBalancer": {"ingress": [
        {"ip": "198.51.100.08"}, {"hostname": "lb.example"}, {"ip": ""},
        {"ip": "198.51.100.9", "ipMode": "Proxy"}, {"ip": "198.51.100.10", "ipMode": "VIP"}]}});
    put(&mut services, "s", &value);
    put_slice(&mut services, "s-1", &slice(json!([{"addresses": ["010.0.0.01"]}])));
    let mut v6 = slice(json!([{"addresses": ["fd00::01"]}]));
    v6["addressType"] = json!("IPv6");
    put_slice(&mut services, "s-2", &v6);
    for to in ["10.96.0.1", "198.51.100.7", "198.51.100.8", "198.51.100.10"] {
        assert!(sent(&mut services, POD, to, 80).starts_with("10.0.0.1:8080"), "{to}");
    }
    assert_eq!(sent(&mut services, POD, "198.51.100.9", 80), "untouched", "it must pass the load balancer");
    assert_eq!(sent(&mut services, (Sender::Pod, "fd00::9"), "fd96::1", 80), "fd00::1:8080");
    assert_eq!(problems(&services), Vec::<String>::new());
}

#[test]
fn source_ranges_guard_the_load_balancer_alone() {
    let open = "10.0.0.1:8080!";
    for (ranges, source, expected) in [
        (json!([]), "203.0.113.5", open),
        (json!(["203.0.113.0/25"]), "203.0.113.5", open),
        (json!(["203.0.113.0/25"]), "203.0.113.200", "dropped"),
        (json!([" 203.0.113.0/25\t"]), "203.0.113.5", open),
        (json!(["2001:db8::/32"]), "203.0.113.200", open),
        (json!(["203.0.113.0/25", "0.0.0.0/0"]), "203.0.113.200", open),
        (json!(["203.0.113.0/25", "::/0"]), "203.0.113.200", "dropped"),
        (json!(["wrong"]), "203.0.113.5", "dropped"),
        (json!(["wrong", "203.0.113.0/25"]), "203.0.113.5", open),
        (json!(["203.0.113.0/25"]), "198.51.100.8", "dropped"),
        (json!(["192.0.2.1/32"]), "198.51.100.8", open),
    ] {
        let mut services = services();
        let mut value = service(json!({"loadBalancerSourceRanges": ranges, "externalIPs": ["198.51.100.7"]}));
        value["status"] = json!({"loadBalancer": {"ingress": [{"ip": "198.51.100.8"}]}});
        put(&mut services, "s", &value);
        put_slice(&mut services, "s-1", &slice(json!([{"addresses": ["10.0.0.1"]}])));
        let from = (Sender::Other, source);
        assert_eq!(sent(&mut services, from, "198.51.100.8", 80), expected, "{ranges} {source}");
        for (to, port) in [("198.51.100.7", 80), ("192.0.2.1", 30_080), ("10.96.0.1", 80)] {
            assert_eq!(sent(&mut services, from, to, port), open, "{to} {ranges} {source}");
        }
    }
}

/// Node ports, also where one is beside an address of a Service.
#[test]
fn node_ports_are_at_chosen_addresses() {
    let all = ["192.0.2.1", "192.0.2.9", "127.0.0.1", "203.0.113.99", "2001:db8::1"];
    let networks =
        |texts: &[&str]| NodePortAddresses::In(texts.iter().map(|text| text.parse().unwrap()).collect());
    for (chosen, expected) in [
        (NodePortAddresses::Primary, &["192.0.2.1", "2001:db8::1"][..]),
        (networks(&[]), &["192.0.2.1", "192.0.2.9", "2001:db8::1"]),
        (networks(&["192.0.2.8/29"]), &["192.0.2.9", "2001:db8::1"]),
        (networks(&["2001:db8:1::/64"]), &["192.0.2.1", "192.0.2.9"]),
        (networks(&["127.0.0.0/8"]), &["2001:db8::1"]),
    ] {
        let mut services = Services::new(NODE, chosen.clone());
        KINDS.into_iter().for_each(|kind| services.listed(kind));
        let addresses =
            [("ExternalIP", "192.0.2.9"), ("InternalIP", "192.0.2.1"), ("InternalIP", "2001:db8::1")];
        let addresses = addresses.map(|(kind, address)| json!({"type": kind, "address": address}));
        put_node(&mut services, json!({}), json!(addresses));
        put(&mut services, "s", &service(json!({"clusterIPs": ["10.96.0.1", "fd96::1"]})));
        let taken = all.iter().filter(|to| {
            let source = if to.contains(':') { "2001:db8:f::5" } else { "203.0.113.5" };
            sent(&mut services, (Sender::Other, source), to, 30_080) == "rejected"
        });
        assert_eq!(taken.copied().collect::<Vec<_>>(), expected, "{chosen:?}");
    }
    // The Node of a datastore without kubelets.
    let mut services = services();
    let node =
        json!({"metadata": {"name": NODE, "annotations": {"projectcalico.org/IPv4Address": "192.0.2.7/24"}}});
    services.update(&Key::global(Kind::Node, NODE), Some(&node));
    services.flush().unwrap();
    let place = &services.state().node_ports[&tortie_api::net::IpVersion::V4];
    assert_eq!(*place, NodePortPlace::Primary(Some("192.0.2.7".parse().unwrap())));
}

#[test]
fn what_no_frontend_takes_at_clusterips_is_closed() {
    let mut services = services();
    put(
        &mut services,
        "s",
        &service(json!({"ports": [{"port": 80}, {"name": "d", "port": 80, "protocol": "UDP"}]})),
    );
    put_slice(&mut services, "s-1", &slice(json!([{"addresses": ["10.0.0.1"]}])));
    let ask = |services: &mut Services, to, port| sent_by(services, POD, to, port);
    assert_eq!(ask(&mut services, "10.96.0.1", (Protocol::TCP, 80)), "10.0.0.1:8080");
    assert_eq!(ask(&mut services, "10.96.0.1", (Protocol::UDP, 80)), "rejected");
    assert_eq!(ask(&mut services, "10.96.0.1", (Protocol::TCP, 81)), "rejected");
    assert_eq!(ask(&mut services, "10.96.0.1", (Protocol::ICMP, 0)), "rejected");
    assert_eq!(ask(&mut services, "10.96.0.2", (Protocol::TCP, 80)), "untouched");
    services.update(
        &Key::global(Kind::ServiceCidr, "kubernetes"),
        Some(&json!({"spec": {"cidrs": ["10.96.0.0/16"]}})),
    );
    assert_eq!(ask(&mut services, "10.96.0.2", (Protocol::TCP, 80)), "dropped");
    assert_eq!(ask(&mut services, "10.97.0.2", (Protocol::TCP, 80)), "untouched");
    services.update(&Key::global(Kind::ServiceCidr, "kubernetes"), None);
    assert_eq!(ask(&mut services, "10.96.0.2", (Protocol::TCP, 80)), "untouched");
}

/// A pod reaches itself, by its own address only.
#[test]
fn a_pod_that_reaches_itself_gets_the_nodes_address() {
    let mut services = services();
    put(&mut services, "s", &service(json!({"externalTrafficPolicy": "Local"})));
    put_slice(
        &mut services,
        "s-1",
        &slice(json!([endpoint("10.0.0.1", "n1", "rs"), endpoint("10.0.0.2", "n2", "rs")])),
    );
    for (from, expected) in
        [("10.0.0.1", "10.0.0.1:8080! 10.0.0.2:8080"), ("10.0.0.2", "10.0.0.1:8080 10.0.0.2:8080")]
    {
        for (to, port) in [("10.96.0.1", 80), ("192.0.2.1", 30_080)] {
            assert_eq!(sent(&mut services, (Sender::Pod, from), to, port), expected, "{from} {to}");
        }
    }
}

/// One address and port has one winner, whatever the order of events, and the other Services learn of it.
#[test]
fn the_first_claim_to_an_address_wins() {
    let claims = |created: &str, external: bool, cluster_ip: &str| {
        let mut value = service(json!({"clusterIP": cluster_ip, "ports": [{"port": 80}]}));
        value["metadata"]["creationTimestamp"] =
            if created.is_empty() { Value::Null } else { json!(created) };
        match external {
            true => value["spec"]["externalIPs"] = json!(["198.51.100.7"]),
            false => value["status"] = json!({"loadBalancer": {"ingress": [{"ip": "198.51.100.7"}]}}),
        }
        value
    };
    let (old, new) = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z");
    for (one, other, winner) in [
        ((old, true), (new, true), "s"),
        ((new, true), (old, true), "t"),
        ((old, true), (old, true), "s"),
        (("", true), (new, true), "t"),
        ((old, true), (new, false), "t"),
    ] {
        for s_first in [true, false] {
            let mut services = services();
            let (s, t) = (claims(one.0, one.1, "10.96.0.1"), claims(other.0, other.1, "10.96.0.2"));
            for (name, value) in if s_first { [("s", &s), ("t", &t)] } else { [("t", &t), ("s", &s)] } {
                put(&mut services, name, value);
                services.flush().unwrap();
            }
            let at = |services: &Services| {
                let address = FrontendAddress::Address("198.51.100.7".parse().unwrap());
                let found = services.state().frontends.iter().find(|(key, _)| key.address == address);
                found.unwrap().1.service_port.service.name.clone()
            };
            assert_eq!(at(&services), winner, "{one:?} {other:?}");
            let loser = if winner == "s" { "t" } else { "s" };
            let expected = format!(
                "Service ns/{loser}: address 198.51.100.7 port 80 of TCP leads to Service ns/{winner}, which has it, too; remove it from one of them"
            );
            assert_eq!(problems(&services), [expected]);
            services.update(&Key::namespaced(Kind::Service, "ns", winner), None);
            services.flush().unwrap();
            assert_eq!((at(&services), problems(&services)), (loser.to_owned(), Vec::new()));
        }
    }
    // A node port of both families is one problem.
    let mut services = services();
    for (name, own) in [("s", ["10.96.0.1", "fd96::1"]), ("t", ["10.96.0.2", "fd96::2"])] {
        put(&mut services, name, &service(json!({"clusterIPs": own})));
    }
    services.flush().unwrap();
    let expected = "Service ns/t: the node port 30080 of TCP leads to Service ns/s, which has it, too; remove it from one of them";
    assert_eq!(problems(&services), [expected]);
    // A clusterIP cannot be taken, and a Service may have one address twice.
    let mut services = crate::setting::services();
    put(&mut services, "s", &service(json!({"externalIPs": ["10.96.0.2", "198.51.100.7", "198.51.100.7"]})));
    put(&mut services, "t", &service(json!({"clusterIP": "10.96.0.2", "ports": [{"port": 80}]})));
    services.flush().unwrap();
    let owner =
        services.state().frontends.values().find(|frontend| frontend.service_port.service.name == "t");
    assert_eq!(owner.map(|frontend| frontend.kind), Some(FrontendKind::ClusterIp));
    assert_eq!(problems(&services).len(), 1, "{:?}", problems(&services));
}

/// Half of a cluster is not translated, and a part of it later changes nothing else.
#[test]
fn changes_begin_with_complete_lists_and_concern_one_service() {
    let mut services = Services::new(NODE, NodePortAddresses::Primary);
    for number in 0..500_u32 {
        let name = format!("s{number}");
        let address = std::net::Ipv4Addr::from(0x0a60_0000 + number).to_string();
        put(&mut services, &name, &service(json!({"clusterIP": address, "ports": [{"port": 80}]})));
    }
    for kind in KINDS {
        assert_eq!(services.flush(), None);
        services.listed(kind);
    }
    assert!(services.flush().unwrap().len() >= 1500);
    let labels = json!({"kubernetes.io/service-name": "s7"});
    let mut slice = slice(json!([endpoint("10.0.0.1", "n1", "rs"), endpoint("10.0.0.2", "n1", "rs")]));
    slice["metadata"]["labels"] = labels;
    put_slice(&mut services, "s7-1", &slice);
    assert_eq!(services.flush().unwrap().len(), 1);
    put_slice(&mut services, "s7-1", &slice);
    assert_eq!(services.flush().unwrap(), []);
    slice["endpoints"][1]["conditions"]["ready"] = json!(false);
    put_slice(&mut services, "s7-1", &slice);
    let deltas = services.flush().unwrap();
    let shown = format!("{deltas:?}");
    assert!(deltas.len() == 1 && shown.contains("removed: [Backend { address: 10.0.0.2"), "{shown}");
}

/// Affinity lasts from the last connection, and is that of one port of a Service.
#[test]
fn affinity_lasts_from_the_last_connection() {
    let mut services = services();
    let spec = json!({"sessionAffinity": "ClientIP", "ports": [{"name": "a", "port": 80, "nodePort": 30080}, {"name": "b", "port": 81}]});
    put(&mut services, "s", &service(spec));
    let mut two = slice(json!([{"addresses": ["10.0.0.1"]}, {"addresses": ["10.0.0.2"]}]));
    two["ports"] = json!([{"name": "a", "port": 8080}, {"name": "b", "port": 8080}]);
    put_slice(&mut services, "s-1", &two);
    services.flush().unwrap();
    let ports: Vec<_> = services.state().ports.iter().collect();
    let ((a, of_a), (b, _)) = (ports[0], ports[1]);
    assert_eq!(of_a.affinity, Some(10_800));
    let (client, backend) = ("203.0.113.5".parse().unwrap(), of_a.cluster.first().unwrap().socket());
    let mut affinities = Affinities::default();
    affinities.connected(a, client, backend, 100);
    for (port, at, is_known) in [(a, 100, true), (a, 10_899, true), (a, 10_900, false), (b, 101, false)] {
        assert_eq!(affinities.of(port, client, 10_800, at).contains(&backend), is_known, "{at}");
    }
    affinities.connected(a, client, backend, 10_000);
    assert!(affinities.of(a, client, 10_800, 20_000).contains(&backend));
    assert!(affinities.of(a, "203.0.113.6".parse().unwrap(), 10_800, 20_000).is_empty());
    affinities.gone(b, backend);
    assert!(!affinities.of(a, client, 10_800, 20_000).is_empty());
    affinities.gone(a, backend);
    assert!(affinities.of(a, client, 10_800, 20_000).is_empty());
}

/// The health check of a load balancer counts addresses of ready endpoints of the node, for all ports together.
#[test]
fn health_checks_count_ready_endpoints_here() {
    let all = json!([
        endpoint("10.0.0.1", "n1", "rs"),
        endpoint("10.0.0.2", "n1", "rs"),
        endpoint("10.0.0.3", "n1", "st"),
        endpoint("10.0.0.4", "n2", "rs"),
    ]);
    let ports = json!([{"name": "a", "port": 80}, {"name": "b", "port": 81}]);
    for (spec, endpoints, expected) in [
        (json!({"externalTrafficPolicy": "Local", "healthCheckNodePort": 32000}), &all, Some(2)),
        (
            json!({"externalTrafficPolicy": "Local", "healthCheckNodePort": 32000}),
            &json!([endpoint("10.0.0.3", "n1", "st")]),
            Some(0),
        ),
        (json!({"externalTrafficPolicy": "Cluster", "healthCheckNodePort": 32000}), &all, None),
        (json!({"externalTrafficPolicy": "Local", "healthCheckNodePort": 0}), &all, None),
        (
            json!({"externalTrafficPolicy": "Local", "healthCheckNodePort": 32000, "type": "NodePort"}),
            &all,
            None,
        ),
    ] {
        let mut services = services();
        let mut value = service(spec);
        value["spec"]["ports"] = ports.clone();
        put(&mut services, "s", &value);
        let mut two = slice(endpoints.clone());
        two["ports"] = json!([{"name": "a", "port": 8080}, {"name": "b", "port": 8081}]);
        put_slice(&mut services, "s-1", &two);
        services.flush().unwrap();
        let checks: Vec<_> = services.state().health_checks.values().collect();
        assert_eq!(checks.first().map(|check| check.local_endpoints), expected, "{value}");
        assert!(checks.iter().all(|check| check.port == 32_000));
        services.update(&Key::namespaced(Kind::Service, "ns", "s"), None);
        services.flush().unwrap();
        assert!(services.state().health_checks.is_empty());
    }
}
