//! Policy for pods that another CNI plugin has connected, on a network that is not Tortie's.

use std::fs;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::TempDir;
use testkit::Stateful;
use tortie_api::calico::WindowsPolicySets;
use tortie_api::net::{Direction, Protocol};
use tortie_dataplane::{Delta, Endpoint, EndpointId, Reason, Report};
use tortie_hcn::schema::{Acl, Modify, Namespace, NamespaceType, RequestType, lenient};

use tortie_hcn::{Call, Failure, Guid, HResult, Hcn, HcnExt};
use tortie_hns_emulator::{AclRemoval, Config, Emulator, Recorder, Verdict};
use tortie_policy::program::{EndOfTier, EndpointProgram, Flow};
use tortie_windows::{PolicyOnly, WindowsDataplane};

use crate::dataplane::node::{NODE, allow_all, open_program, packet, policy, policy_sets, tier};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 5);
const PEER: Ipv4Addr = Ipv4Addr::new(10, 9, 1, 7);

struct Bed {
    hns: Arc<Recorder<Emulator>>,
    dataplane: Stateful<WindowsDataplane>,
    results: TempDir,
    network: Guid,
    ahead: Arc<Mutex<Duration>>,
}

impl Bed {
    fn new() -> Bed {
        Bed::on(Config::new(Config::SERVER_2022, NODE))
    }

    /// A node with the network of another plugin.
    fn on(config: Config) -> Bed {
        let hns = Arc::new(Recorder::new(Emulator::new(config)));
        let document = json!({"Name": "cbr0", "Type": "L2Bridge", "Ipams": [{"Subnets": [{"IpAddressPrefix": "10.9.0.0/16",
            "Routes": [{"NextHop": "10.9.0.1", "DestinationPrefix": "0.0.0.0/0"}]}]}]});
        let network = hns.create_network(&lenient(&document.to_string()).unwrap()).unwrap();
        let results = tempfile::tempdir().unwrap();
        let (start, ahead) = (Instant::now(), Arc::new(Mutex::new(Duration::ZERO)));
        let clock = Arc::clone(&ahead);
        let hcn: Arc<dyn Hcn> = hns.clone();
        let dataplane = WindowsDataplane::with_clock(hcn, Box::new(move || start + *clock.lock().unwrap()));
        let policy_only = PolicyOnly { results: results.path().to_owned() };
        let dataplane = Stateful::new(dataplane.with_policy_only(policy_only));
        Bed { hns, dataplane, results, network, ahead }
    }

    /// What a plugin makes for a sandbox, with a result that the runtime keeps.
    fn attach(&self, pod: &str, container: &str, address: Ipv4Addr) -> Guid {
        let endpoint = self.attach_without_result(container, address);
        self.keep_result(pod, container, address);
        endpoint
    }

    fn attach_without_result(&self, container: &str, address: Ipv4Addr) -> Guid {
        self.attach_in(&Namespace::default(), container, address)
    }

    fn attach_in(&self, namespace: &Namespace, container: &str, address: Ipv4Addr) -> Guid {
        let document = json!({"Name": format!("{container}_cbr0"), "HostComputeNetwork": self.network,
            "IpConfigurations": [{"IpAddress": address}]});
        let endpoint = self.hns.create_endpoint(&lenient(&document.to_string()).unwrap()).unwrap();
        let namespace = self.hns.create_namespace(namespace).unwrap();
        let add = Modify::namespace_endpoint(RequestType::Add, endpoint);
        self.hns.modify_namespace(namespace, &add).unwrap();
        endpoint
    }

    fn keep_result(&self, pod: &str, container: &str, address: Ipv4Addr) {
        let result = json!({
            "kind": "cniCacheV1", "containerId": container, "ifName": "eth0",
            "cniArgs": [["K8S_POD_NAMESPACE", "n"], ["K8S_POD_NAME", pod]],
            "result": {"ips": [{"address": format!("{address}/16")}]},
        });
        fs::write(self.results.path().join(format!("cbr0-{container}-eth0")), result.to_string()).unwrap();
    }

    fn detach(&self, container: &str, endpoint: Guid) {
        self.hns.delete_endpoint(endpoint).unwrap();
        fs::remove_file(self.results.path().join(format!("cbr0-{container}-eth0"))).unwrap();
    }

    fn apply(&mut self, deltas: &[Delta]) -> Report {
        self.dataplane.apply(deltas)
    }

    fn wait(&self, seconds: u64) {
        *self.ahead.lock().unwrap() += Duration::from_secs(seconds);
    }

    fn resync(&mut self, seconds: u64) -> Report {
        self.wait(seconds);
        self.dataplane.resync()
    }

    /// Whether a connection from the peer, and one to it, pass the endpoint.
    fn passes(&self, endpoint: Guid) -> [bool; 2] {
        let flow = |source: Ipv4Addr, destination: Ipv4Addr| Flow {
            source: source.into(),
            destination: destination.into(),
            source_port: 40_000,
            destination_port: 80,
            protocol: Protocol::TCP,
            icmp: None,
        };
        let pass = |direction, flow: Flow| {
            self.hns.inner().judge(endpoint, &packet(direction, &flow)).unwrap() == Verdict::Allow
        };
        [pass(Direction::Ingress, flow(PEER, ADDRESS)), pass(Direction::Egress, flow(ADDRESS, PEER))]
    }
}

fn id(pod: &str) -> EndpointId {
    EndpointId { namespace: "n".into(), pod: pod.into(), interface: "eth0".into() }
}

/// A pod as the Kubernetes API has it.
fn pod(name: &str, program: EndpointProgram) -> Delta {
    let endpoint = Endpoint {
        container_id: "".into(),
        host_interface: "".into(),
        addresses: vec![ADDRESS.into()],
        mac: None,
        host_ports: Default::default(),
        program: Arc::new(program),
    };
    Delta::Endpoint(id(name), Arc::new(endpoint))
}

/// Nobody may connect to the pod.
fn isolated() -> EndpointProgram {
    EndpointProgram { ingress: vec![tier("default", &["none"], EndOfTier::Deny)], ..open_program() }
}

fn none() -> Delta {
    policy("none", vec![], vec![])
}

fn reasons(report: &Report, pod: &str) -> Vec<Reason> {
    report.endpoints.get(&id(pod)).into_iter().flatten().map(|condition| condition.reason).collect()
}

#[test]
fn policy_takes_effect_and_nothing_else_is_changed() {
    let mut bed = Bed::new();
    let endpoint = bed.attach("a", "0123456789abcdef", ADDRESS);
    bed.hns.take();
    assert_eq!(bed.apply(&[allow_all(), none(), pod("a", open_program())]), Report::default());
    assert_eq!(bed.passes(endpoint), [true, true]);
    assert_eq!(bed.apply(&[pod("a", isolated())]), Report::default());
    assert_eq!(bed.passes(endpoint), [false, true]);
    let changes = bed.hns.take_changes();
    assert!(!changes.is_empty());
    for call in changes {
        assert!(matches!(call, Call::Modify { id, .. } if id == endpoint), "{call:?}");
    }
    assert_eq!(bed.resync(60), Report::default());
    assert!(bed.hns.take_changes().is_empty(), "nothing is sent again");
    let report = bed.apply(&[policy_sets(WindowsPolicySets::Enabled)]);
    assert_eq!(report.node.iter().map(|it| it.reason).collect::<Vec<_>>(), [Reason::FieldNotSupported]);
}

#[test]
fn an_endpoint_without_proof_is_closed_until_there_is_one() {
    let mut bed = Bed::new();
    let endpoint = bed.attach_without_result("0123456789abcdef", ADDRESS);
    let report = bed.apply(&[allow_all(), pod("a", open_program())]);
    assert_eq!((reasons(&report, "a"), report.retry), (vec![Reason::InterfaceUnproven], true));
    assert_eq!(bed.passes(endpoint), [false, false]);
    bed.keep_result("a", "0123456789abcdef", ADDRESS);
    assert_eq!(bed.resync(10), Report::default());
    assert_eq!(bed.passes(endpoint), [true, true]);
}

/// The plugin has answered, and the API does not have the address yet.
#[test]
fn the_endpoint_of_a_pod_that_the_api_does_not_know_yet_is_closed() {
    let mut bed = Bed::new();
    assert_eq!(bed.apply(&[allow_all()]), Report::default());
    let endpoint = bed.attach("a", "0123456789abcdef", ADDRESS);
    let foreign = bed.attach_without_result("fedcba9876543210", PEER);
    assert_eq!(bed.passes(endpoint), [true, true], "until the agent looks");
    assert_eq!(bed.resync(10), Report::default());
    assert_eq!(bed.passes(endpoint), [false, false]);
    assert_eq!(bed.passes(foreign), [true, true], "nothing says that this one is a pod's");
    assert_eq!(bed.apply(&[pod("a", open_program())]), Report::default());
    assert_eq!(bed.passes(endpoint), [true, true]);
}

/// The API says for a while that the pod before has the address.
#[test]
fn the_next_pod_with_an_address_never_gets_the_policy_of_the_one_before() {
    let mut bed = Bed::new();
    let before = bed.attach("open", "0123456789abcdef", ADDRESS);
    assert_eq!(bed.apply(&[allow_all(), none(), pod("open", open_program())]), Report::default());
    bed.detach("0123456789abcdef", before);
    let after = bed.attach("closed", "fedcba9876543210", ADDRESS);
    let report = bed.resync(10);
    assert_eq!(reasons(&report, "open"), [Reason::InterfaceUnproven], "{report:?}");
    assert_eq!(bed.passes(after), [false, false]);
    let report = bed.apply(&[pod("closed", isolated())]);
    assert_eq!(reasons(&report, "closed"), []);
    assert_eq!(bed.passes(after), [false, true]);
    assert_eq!(bed.apply(&[Delta::EndpointRemoved(id("open"))]), Report::default());
    assert_eq!(bed.passes(after), [false, true]);
}

/// A recognised endpoint whose proof is gone loses what its policy allowed.
#[test]
fn an_endpoint_that_is_known_no_longer_is_closed_completely() {
    let mut bed = Bed::new();
    let endpoint = bed.attach("a", "0123456789abcdef", ADDRESS);
    assert_eq!(bed.apply(&[allow_all(), pod("a", open_program())]), Report::default());
    fs::remove_file(bed.results.path().join("cbr0-0123456789abcdef-eth0")).unwrap();
    let report = bed.resync(60);
    assert_eq!(reasons(&report, "a"), [Reason::InterfaceUnproven]);
    assert_eq!(bed.passes(endpoint), [false, false]);
    let policies = bed.hns.inner().endpoint(endpoint).unwrap().policies;
    let acls: Vec<Acl> = policies.iter().filter_map(|policy| policy.settings().unwrap()).collect();
    assert_eq!(acls.len(), 2, "{acls:?}");
}

/// When a pod ends, its endpoint goes before its object.
#[test]
fn a_vanished_endpoint_is_reported_after_a_while() {
    let mut bed = Bed::new();
    let endpoint = bed.attach("a", "0123456789abcdef", ADDRESS);
    assert_eq!(bed.apply(&[allow_all(), pod("a", open_program())]), Report::default());
    bed.detach("0123456789abcdef", endpoint);
    assert_eq!(reasons(&bed.resync(20), "a"), []);
    assert_eq!(reasons(&bed.resync(20), "a"), []);
    assert_eq!(reasons(&bed.resync(60), "a"), [Reason::InterfaceMissing]);
    // One that never had an endpoint is reported at once.
    let mut bed = Bed::new();
    assert_eq!(
        reasons(&bed.apply(&[allow_all(), pod("a", open_program())]), "a"),
        [Reason::InterfaceMissing]
    );
}

#[test]
fn results_that_cannot_be_read_change_nothing_and_are_reported() {
    let mut bed = Bed::new();
    let endpoint = bed.attach("a", "0123456789abcdef", ADDRESS);
    assert_eq!(bed.apply(&[allow_all(), none(), pod("a", isolated())]), Report::default());
    let folder = bed.results.path().to_owned();
    fs::rename(&folder, folder.with_extension("away")).unwrap();
    fs::write(&folder, "a file").unwrap();
    let report = bed.resync(60);
    assert_eq!(reasons(&report, "a"), [Reason::PolicyNotInForce]);
    assert!(report.node.iter().any(|condition| condition.message.contains("--cni-results")), "{report:?}");
    assert_eq!(bed.passes(endpoint), [false, true]);
    fs::remove_file(&folder).unwrap();
    fs::rename(folder.with_extension("away"), &folder).unwrap();
    assert_eq!(bed.resync(60), Report::default());
}

/// Whoever may write a Pod's status could otherwise cut the node off.
#[test]
fn endpoints_of_the_node_are_never_closed() {
    let mut bed = Bed::new();
    let of_node = Namespace { r#type: NamespaceType::HostDefault, ..Namespace::default() };
    let endpoint = bed.attach_in(&of_node, "host", ADDRESS);
    let report = bed.apply(&[allow_all(), pod("liar", open_program())]);
    assert_eq!(reasons(&report, "liar"), [Reason::InterfaceMissing]);
    bed.resync(60);
    assert_eq!(bed.passes(endpoint), [true, true]);
    assert!(bed.hns.inner().endpoint(endpoint).unwrap().policies.is_empty());
}

fn conditions(report: &Report) -> Vec<Reason> {
    report.node.iter().map(|condition| condition.reason).collect()
}

/// Another plugin makes its endpoints open. If HNS refuses the pod's list, the endpoint is at least closed.
#[test]
fn an_endpoint_whose_list_is_refused_is_closed() {
    let mut bed = Bed::new();
    let endpoint = bed.attach("a", "0123456789abcdef", ADDRESS);
    // Whatever allows anything.
    bed.hns.set_fault(|call| {
        let allows = matches!(call, Call::Modify { settings, .. } if settings.contains("Allow"));
        allows.then(|| Err(Failure::new(HResult::HCN_E_INVALID_POLICY, "not today")))
    });
    let report = bed.apply(&[allow_all(), pod("a", open_program())]);
    assert_eq!((reasons(&report, "a"), report.retry), (vec![Reason::HnsRefused], true));
    assert_eq!(bed.passes(endpoint), [false, false]);
    bed.hns.clear_fault();
    assert_eq!(bed.resync(60), Report::default());
    assert_eq!(bed.passes(endpoint), [true, true]);
}

/// What could not be closed stays in the report, and is tried again.
#[test]
fn a_failed_closing_is_reported_until_it_succeeds() {
    let mut bed = Bed::new();
    assert_eq!(bed.apply(&[allow_all()]), Report::default());
    let endpoint = bed.attach("a", "0123456789abcdef", ADDRESS);
    bed.hns.set_fault(|call| {
        matches!(call, Call::Modify { .. })
            .then(|| Err(Failure::new(HResult::HCN_E_INVALID_POLICY, "not today")))
    });
    for seconds in [60, 1, 1, 1] {
        let report = bed.resync(seconds);
        assert_eq!((conditions(&report), report.retry), (vec![Reason::HnsRefused], true), "{seconds}");
    }
    bed.hns.clear_fault();
    assert_eq!(bed.resync(5), Report::default());
    assert_eq!(bed.passes(endpoint), [false, false]);
}

/// On some builds, Remove removes no ACL.
#[test]
fn an_endpoint_is_closed_also_where_remove_does_nothing() {
    let config = Config::new(Config::SERVER_2022, NODE);
    let mut bed = Bed::on(Config { acl_removal: AclRemoval::IgnoredSilently, ..config });
    let endpoint = bed.attach("a", "0123456789abcdef", ADDRESS);
    assert_eq!(bed.apply(&[allow_all(), pod("a", open_program())]), Report::default());
    fs::remove_file(bed.results.path().join("cbr0-0123456789abcdef-eth0")).unwrap();
    let report = bed.resync(60);
    assert_eq!((reasons(&report, "a"), conditions(&report)), (vec![Reason::InterfaceUnproven], vec![]));
    assert_eq!(bed.passes(endpoint), [false, false]);
}

/// A pod has a second endpoint, on which there is no policy.
#[test]
fn a_further_endpoint_of_a_pod_is_closed_and_reported() {
    let mut bed = Bed::new();
    let own = bed.attach("a", "0123456789abcdef", ADDRESS);
    let document = json!({"Name": "01234567-eth0", "HostComputeNetwork": bed.network,
        "IpConfigurations": [{"IpAddress": PEER}]});
    let further = bed.hns.create_endpoint(&lenient(&document.to_string()).unwrap()).unwrap();
    let report = bed.apply(&[allow_all(), pod("a", open_program())]);
    assert_eq!((conditions(&report), report.retry), (vec![Reason::InterfaceClosed], false), "{report:?}");
    assert_eq!((bed.passes(own), bed.passes(further)), ([true, true], [false, false]));
}
