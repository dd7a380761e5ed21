//! The addresses of single Services: a table of cases, and random histories beside a model that decides from scratch.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use serde_json::{Value, json};
use testkit::random::{Random, Tally};
use tortie_bgp::calico::{ServiceRoutes, ServiceSettings};

/// The node whose routes are judged.
const HERE: &str = "n1";

fn settings(spec: Value) -> ServiceSettings {
    ServiceSettings::new(&serde_json::from_value(spec).unwrap())
}

/// A Service of type LoadBalancer with an address of each kind, and changes of its specification.
fn service(name: &str, changes: Value) -> Value {
    let mut spec = json!({"type": "LoadBalancer", "clusterIP": "10.96.0.7", "clusterIPs": ["10.96.0.7"], "ipFamilies": ["IPv4"],
        "externalIPs": ["198.51.100.7"], "externalTrafficPolicy": "Local"});
    spec.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    let ingress = json!([{"ip": "203.0.113.7"}, {"hostname": "balancer.example"}]);
    json!({"metadata": {"name": name, "namespace": "shop"}, "spec": spec, "status": {"loadBalancer": {"ingress": ingress}}})
}

/// A slice of the Service with backends: node, and whether it is ready.
fn slice(name: &str, service: &str, family: &str, backends: &[(&str, Option<bool>)]) -> Value {
    let endpoints: Vec<Value> = backends
        .iter()
        .map(|(node, ready)| json!({"addresses": ["10.1.0.9"], "nodeName": node, "conditions": {"ready": ready}}))
        .collect();
    let labels = json!({"kubernetes.io/service-name": service});
    json!({"metadata": {"name": name, "namespace": "shop", "labels": labels}, "addressType": family, "endpoints": endpoints})
}

fn name(value: &Value) -> (String, String) {
    ("shop".to_owned(), value["metadata"]["name"].as_str().unwrap().to_owned())
}

fn put_service(routes: &mut ServiceRoutes, value: &Value) -> bool {
    routes.set_service(&name(value), Some(&serde_json::from_value(value.clone()).unwrap()))
}

fn put_slice(routes: &mut ServiceRoutes, value: &Value) -> bool {
    routes.set_slice(&name(value), Some(&serde_json::from_value(value.clone()).unwrap()))
}

fn texts(routes: &ServiceRoutes) -> Vec<String> {
    routes.addresses().iter().map(ToString::to_string).collect()
}

/// Networks of all kinds that contain the addresses of [`service`].
fn networks() -> Value {
    json!({"serviceClusterIPs": [{"cidr": "10.96.0.0/16"}], "serviceExternalIPs": [{"cidr": "198.51.100.0/24"}],
        "serviceLoadBalancerIPs": [{"cidr": "203.0.113.0/24"}]})
}

const ALL: [&str; 3] = ["10.96.0.7/32", "198.51.100.7/32", "203.0.113.7/32"];

#[test]
fn a_node_advertises_the_services_that_calico_advertises() {
    let here = [(HERE, Some(true))];
    let ipv4 = |backends: &[(&str, Option<bool>)]| vec![slice("a", "s", "IPv4", backends)];
    let of = |changes: Value| {
        let mut spec = networks();
        spec.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        spec
    };
    let alone = |field: &str, cidr: &str| of(json!({field: [{"cidr": cidr}]}));
    let cluster = json!({"externalTrafficPolicy": "Cluster"});
    let one_by_one = of(json!({"serviceLoadBalancerAggregation": "Disabled"}));
    let none: &[&str] = &[];
    // What it is about; the settings, changes of the Service, its slices, and what is advertised.
    let cases = [
        ("a backend here", networks(), json!({}), ipv4(&here), &ALL[..]),
        ("readiness is unknown", networks(), json!({}), ipv4(&[(HERE, None)]), &ALL),
        ("the backend is not ready", networks(), json!({}), ipv4(&[(HERE, Some(false))]), none),
        ("a backend on another node", networks(), json!({}), ipv4(&[("n2", Some(true))]), none),
        (
            "a ready one there, one that is not here",
            networks(),
            json!({}),
            ipv4(&[("n2", None), (HERE, Some(false))]),
            none,
        ),
        ("no backend", networks(), json!({}), ipv4(&[]), none),
        ("no slice", networks(), json!({}), vec![], none),
        (
            "in the second slice",
            networks(),
            json!({}),
            vec![slice("a", "s", "IPv4", &[]), slice("b", "s", "IPv4", &here)],
            &ALL,
        ),
        ("of another Service", networks(), json!({}), vec![slice("a", "t", "IPv4", &here)], none),
        ("of a family that it has not", networks(), json!({}), vec![slice("a", "s", "IPv6", &here)], none),
        ("names as addresses", networks(), json!({}), vec![slice("a", "s", "FQDN", &here)], none),
        (
            "families by the addresses, and all of them if one has a backend",
            of(json!({"serviceLoadBalancerIPs": []})),
            json!({"ipFamilies": null, "clusterIPs": ["10.96.0.7", "fd96::7"]}),
            ipv4(&here),
            &["10.96.0.7/32", "198.51.100.7/32", "fd96::7/128"],
        ),
        ("other types", networks(), json!({"type": "NodePort"}), ipv4(&here), &ALL),
        ("a name only", networks(), json!({"type": "ExternalName"}), ipv4(&here), none),
        ("headless", networks(), json!({"clusterIP": "None", "clusterIPs": ["None"]}), ipv4(&here), none),
        ("any backend", networks(), cluster.clone(), ipv4(&here), none),
        ("any backend is the default", networks(), json!({"externalTrafficPolicy": null}), ipv4(&here), none),
        // Only what the settings name. Cluster addresses are advertised if any are.
        ("no cluster addresses", of(json!({"serviceClusterIPs": []})), json!({}), ipv4(&here), &ALL[1..]),
        (
            "other cluster addresses",
            of(json!({"serviceClusterIPs": [{"cidr": "10.97.0.0/16"}]})),
            json!({}),
            ipv4(&here),
            &ALL,
        ),
        (
            "other external addresses",
            alone("serviceExternalIPs", "192.0.2.0/24"),
            json!({}),
            ipv4(&here),
            &[ALL[0], ALL[2]],
        ),
        (
            "other load balancers",
            alone("serviceLoadBalancerIPs", "192.0.2.0/24"),
            json!({}),
            ipv4(&here),
            &ALL[..2],
        ),
        ("nothing", json!({}), json!({}), ipv4(&here), none),
        // An address that stands alone: all nodes, whatever the backends are.
        (
            "a lone balancer",
            alone("serviceLoadBalancerIPs", "203.0.113.7/32"),
            cluster.clone(),
            ipv4(&[]),
            &ALL,
        ),
        (
            "a lone external address",
            alone("serviceExternalIPs", "198.51.100.7/32"),
            cluster.clone(),
            ipv4(&[]),
            &ALL,
        ),
        ("without a slice", alone("serviceExternalIPs", "198.51.100.7/32"), cluster.clone(), vec![], none),
        (
            "another lone address",
            alone("serviceExternalIPs", "198.51.100.8/32"),
            cluster.clone(),
            ipv4(&here),
            none,
        ),
        (
            "a lone balancer of a Service of another type",
            alone("serviceLoadBalancerIPs", "203.0.113.7/32"),
            json!({"externalTrafficPolicy": "Cluster", "type": "NodePort"}),
            ipv4(&here),
            none,
        ),
        (
            "a lone address with backends elsewhere",
            alone("serviceExternalIPs", "198.51.100.7/32"),
            json!({}),
            ipv4(&[("n2", None)]),
            none,
        ),
        (
            "a lone address with a backend here",
            alone("serviceExternalIPs", "198.51.100.7/32"),
            json!({}),
            ipv4(&here),
            &ALL,
        ),
        // Load balancers one by one.
        (
            "one by one, a backend anywhere",
            one_by_one.clone(),
            cluster.clone(),
            ipv4(&[("n2", Some(true))]),
            &ALL,
        ),
        ("one by one, none ready", one_by_one.clone(), cluster.clone(), ipv4(&[("n2", Some(false))]), none),
        (
            "one by one, another family",
            one_by_one.clone(),
            cluster.clone(),
            vec![slice("a", "s", "IPv6", &here)],
            none,
        ),
        ("one by one, Local", one_by_one.clone(), json!({}), ipv4(&[("n2", Some(true))]), none),
        ("one by one, Local and here", one_by_one, json!({}), ipv4(&here), &ALL),
    ];
    for (about, spec, changes, slices, expected) in cases {
        let mut routes = ServiceRoutes::new(HERE);
        routes.set_settings(settings(spec));
        put_service(&mut routes, &service("s", changes));
        for slice in &slices {
            put_slice(&mut routes, slice);
        }
        assert_eq!(texts(&routes), expected, "{about}");
    }
    // A balancer that packets must pass is not this node's to advertise.
    let mut passed = service("s", json!({}));
    passed["status"]["loadBalancer"]["ingress"][0]["ipMode"] = json!("Proxy");
    let mut routes = ServiceRoutes::new(HERE);
    routes.set_settings(settings(networks()));
    put_service(&mut routes, &passed);
    put_slice(&mut routes, &slice("a", "s", "IPv4", &here));
    assert_eq!(texts(&routes), ALL[..2]);
}

#[test]
fn networks_are_advertised_by_all_nodes_unless_they_are_one_address() {
    let spec = json!({"serviceClusterIPs": [{"cidr": "10.96.0.0/16"}, {"cidr": "10.97.0.1/32"}, {}],
        "serviceExternalIPs": [{"cidr": "198.51.100.0/24"}, {"cidr": "192.0.2.1/32"}, {"cidr": "fd01::1/128"}],
        "serviceLoadBalancerIPs": [{"cidr": "203.0.113.0/24"}, {"cidr": "192.0.2.2/32"}]});
    for (aggregation, balancers) in
        [(json!(null), true), (json!("Enabled"), true), (json!(""), true), (json!("Disabled"), false)]
    {
        let mut spec = spec.clone();
        spec["serviceLoadBalancerAggregation"] = aggregation.clone();
        let networks: Vec<String> =
            settings(spec).advertised_networks().iter().map(ToString::to_string).collect();
        let mut expected = vec!["10.96.0.0/16", "10.97.0.1/32", "198.51.100.0/24"];
        expected.extend(balancers.then_some("203.0.113.0/24"));
        assert_eq!(networks, expected, "{aggregation}");
    }
    assert!(!settings(json!({"serviceLoadBalancerAggregation": "Disabled"})).need_services());
    assert!(settings(json!({"serviceExternalIPs": [{"cidr": "192.0.2.1/32"}]})).need_services());
}

/// A step of a history.
#[derive(Debug, Clone)]
enum Step {
    Service(usize, Option<Value>),
    Slice(usize, Option<Value>),
    Settings(Value),
}

const NAMES: [&str; 3] = ["s0", "s1", "s2"];

fn step() -> impl Strategy<Value = Step> {
    let policies = select(vec![json!("Local"), json!("Cluster"), json!(null)]);
    let kinds = select(vec!["LoadBalancer", "LoadBalancer", "ClusterIP", "NodePort", "ExternalName"]);
    let families = subsequence(vec!["IPv4", "IPv6"], 0..=2);
    let external = subsequence(vec!["198.51.100.1", "198.51.100.2", "192.0.2.9", "fd51::1"], 0..=3);
    let ingress = subsequence(vec!["203.0.113.1", "203.0.113.2", "fd13::1"], 0..=2);
    let cluster = select(vec![
        vec!["10.96.0.1"],
        vec!["10.96.0.2", "fd96::2"],
        vec!["fd96::1"],
        vec!["fd96::3", "10.96.0.3"],
        vec!["None"],
    ]);
    let of_service = (policies, kinds, families, external, ingress, cluster).prop_map(
        |(policy, kind, families, external, ingress, cluster)| {
            let ingress: Vec<Value> = ingress.iter().map(|ip| json!({"ip": ip})).collect();
            json!({"spec": {"type": kind, "externalTrafficPolicy": policy, "ipFamilies": families, "externalIPs": external,
                "clusterIP": cluster[0], "clusterIPs": cluster}, "status": {"loadBalancer": {"ingress": ingress}}})
        },
    );
    let backend = (select(vec![HERE, "n2"]), select(vec![None, Some(true), Some(false)]));
    let family = select(vec!["IPv4", "IPv4", "IPv6", "FQDN"]);
    let of_slice = (select(NAMES.to_vec()), family, vec(backend, 0..3))
        .prop_map(|(service, family, backends)| slice("", service, family, &backends));
    let cidrs = |all: Vec<&'static str>| {
        subsequence(all, 0..=2)
            .prop_map(|some| json!(some.iter().map(|cidr| json!({"cidr": cidr})).collect::<Vec<_>>()))
    };
    let of_settings = (
        cidrs(vec!["10.96.0.0/24", "fd96::/64"]),
        cidrs(vec!["198.51.100.0/24", "198.51.100.2/32", "fd51::1/128"]),
        cidrs(vec!["203.0.113.0/24", "203.0.113.2/32", "fd13::/64"]),
        select(vec![json!("Enabled"), json!("Disabled"), json!(null)]),
    )
        .prop_map(|(cluster, external, balancers, aggregation)| {
            json!({"serviceClusterIPs": cluster, "serviceExternalIPs": external, "serviceLoadBalancerIPs": balancers,
                "serviceLoadBalancerAggregation": aggregation})
        });
    prop_oneof![
        4 => (0..NAMES.len(), proptest::option::weighted(0.8, of_service)).prop_map(|(at, it)| Step::Service(at, it)),
        6 => (0..4_usize, proptest::option::weighted(0.8, of_slice)).prop_map(|(at, it)| Step::Slice(at, it)),
        2 => of_settings.prop_map(Step::Settings),
    ]
}

/// Everything that exists, as text.
#[derive(Debug, Default)]
struct Model {
    settings: Value,
    services: BTreeMap<usize, Value>,
    slices: BTreeMap<usize, Value>,
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(|it| it.as_str().map(str::to_owned)).collect()
}

impl Model {
    fn cidrs(&self, field: &str) -> Vec<IpNet> {
        let blocks = self.settings[field].as_array().into_iter().flatten();
        blocks.map(|block| block["cidr"].as_str().unwrap().parse().unwrap()).collect()
    }

    fn addresses(&self, tally: &mut Tally) -> BTreeSet<IpNet> {
        let mut all = BTreeSet::new();
        for (at, service) in &self.services {
            let advertised = self.is_advertised(NAMES[*at], service, tally);
            if advertised {
                all.extend(self.all_of(service));
            }
        }
        all
    }

    fn all_of(&self, service: &Value) -> Vec<IpNet> {
        let host = |text: &String| text.parse().ok().map(|address: std::net::IpAddr| IpNet::from(address));
        let within = |cidrs: Vec<IpNet>| move |net: &IpNet| cidrs.iter().any(|cidr| cidr.contains(net));
        let mut all = Vec::new();
        if !self.cidrs("serviceClusterIPs").is_empty() {
            all.extend(strings(&service["spec"]["clusterIPs"]).iter().filter_map(host));
        }
        let external = strings(&service["spec"]["externalIPs"]);
        all.extend(external.iter().filter_map(host).filter(within(self.cidrs("serviceExternalIPs"))));
        let ingress = balancers(service);
        all.extend(ingress.iter().filter_map(host).filter(within(self.cidrs("serviceLoadBalancerIPs"))));
        all
    }

    fn is_advertised(&self, name: &str, service: &Value, tally: &mut Tally) -> bool {
        let spec = &service["spec"];
        let own = strings(&spec["clusterIPs"]);
        if spec["type"] == "ExternalName" || own.iter().all(|it| it == "None") {
            return false;
        }
        let slices: Vec<&Value> = self
            .slices
            .values()
            .filter(|slice| slice["metadata"]["labels"]["kubernetes.io/service-name"] == name)
            .collect();
        let is_local = spec["externalTrafficPolicy"] == "Local";
        let one_by_one = self.settings["serviceLoadBalancerAggregation"] == "Disabled";
        let lone = |field: &str, address: &String| {
            self.cidrs(field)
                .iter()
                .any(|cidr| [format!("{address}/32"), format!("{address}/128")].contains(&cidr.to_string()))
        };
        let has_lone = strings(&spec["externalIPs"]).iter().any(|it| lone("serviceExternalIPs", it))
            || spec["type"] == "LoadBalancer"
                && balancers(service).iter().any(|it| lone("serviceLoadBalancerIPs", it));
        let mut families = strings(&spec["ipFamilies"]);
        if families.is_empty() {
            families =
                own.iter().map(|it| if it.contains(':') { "IPv6" } else { "IPv4" }.to_owned()).collect();
        }
        let backends = slices
            .iter()
            .filter(|slice| families.iter().any(|family| slice["addressType"] == **family))
            .flat_map(|slice| slice["endpoints"].as_array().unwrap());
        let ready: Vec<&Value> =
            backends.filter(|backend| backend["conditions"]["ready"] != json!(false)).collect();
        let is_here = ready.iter().any(|backend| backend["nodeName"] == HERE);
        match (is_local, has_lone, one_by_one) {
            (true, ..) => counted(tally, "a backend here", is_here),
            (false, true, _) if !slices.is_empty() => counted(tally, "a lone address", true),
            (false, _, true) => counted(tally, "one by one", !ready.is_empty()),
            (false, ..) => counted(tally, "a lone address", false),
        }
    }
}

fn balancers(service: &Value) -> Vec<String> {
    let ingress = service["status"]["loadBalancer"]["ingress"].as_array().into_iter().flatten();
    ingress.filter_map(|it| it["ip"].as_str().map(str::to_owned)).collect()
}

fn counted(tally: &mut Tally, kind: &str, holds: bool) -> bool {
    tally.count(kind, holds);
    holds
}

#[test]
fn after_any_history_the_addresses_are_those_of_the_objects() {
    let tally = RefCell::new(Tally::default());
    let test = |steps: Vec<Step>| {
        let mut routes = ServiceRoutes::new(HERE);
        let mut model = Model::default();
        for step in steps {
            let before = routes.addresses();
            let differs = apply(&mut routes, &mut model, &step);
            prop_assert_eq!(routes.addresses(), model.addresses(&mut tally.borrow_mut()), "after {:?}", step);
            prop_assert!(differs || before == routes.addresses(), "a change is not reported: {:?}", step);
        }
        Ok(())
    };
    let kinds = || ["a backend here", "a lone address", "one by one"].map(str::to_owned);
    let lacking = || tally.borrow().lacking(kinds(), 100);
    Random::cases(300).shrinking(500).prove(&vec(step(), 1..40), test, lacking).unwrap();
}

fn apply(routes: &mut ServiceRoutes, model: &mut Model, step: &Step) -> bool {
    let named = |value: &Value, name: &str| {
        let mut value = value.clone();
        value["metadata"]["name"] = json!(name);
        value
    };
    match step {
        Step::Settings(spec) => {
            model.settings = spec.clone();
            routes.set_settings(settings(spec.clone()))
        }
        Step::Service(at, Some(value)) => {
            model.services.insert(*at, value.clone());
            put_service(routes, &named(value, NAMES[*at]))
        }
        Step::Service(at, None) => {
            model.services.remove(at);
            routes.set_service(&("shop".to_owned(), NAMES[*at].to_owned()), None)
        }
        Step::Slice(at, Some(value)) => {
            model.slices.insert(*at, value.clone());
            put_slice(routes, &named(value, &format!("slice{at}")))
        }
        Step::Slice(at, None) => {
            model.slices.remove(at);
            routes.set_slice(&("shop".to_owned(), format!("slice{at}")), None)
        }
    }
}
