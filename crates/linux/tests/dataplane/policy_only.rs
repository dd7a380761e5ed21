//! Policy for pods that another plugin has connected, when the agent's thread looks late or could not look before.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::TempDir;
use testkit::Stateful;
use tortie_api::calico::EstablishedFlows;
use tortie_dataplane::*;
use tortie_kernel::interface_index;
use tortie_kernel::nftables::Nft;
use tortie_kernel::route::{Address, Change, Route, RouteSocket};
use tortie_linux::Dataplane;
use tortie_linux::dataplane::{Config, PolicyOnly};
use tortie_policy::program::*;

use crate::common::cluster::*;

/// A node whose runtime keeps results in a folder.
struct Foreign {
    node: Node,
    config: Config,
    folder: TempDir,
}

impl Foreign {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let results = folder.path().join("results");
        std::fs::create_dir(&results).unwrap();
        let policy_only = Some(PolicyOnly { prefixes: vec!["eni".to_owned()], results });
        let config = Config { policy_only, ..Config::default() };
        let mut node = Node::with(&Underlay::new(), 1, config.clone());
        let forward = || std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
        node.namespace.run(forward).unwrap();
        let report = node.change(|state| {
            open_profile(state);
            state.policies.insert(policy_id("closed"), Arc::new(PolicyRules::default()));
        });
        assert_eq!(report, Report::default());
        Self { node, config, folder }
    }

    /// What another plugin and the runtime do for a pod. Returns the interface on the host.
    fn attach(&mut self, pod: &Pod) -> String {
        let connect = || {
            let interface = self.node.wiring.connect(&pod.attachment()).unwrap();
            assert!(self.node.wiring.wait_until_live(&interface, TIMEOUT));
            let link = interface_index(&interface.host_interface).unwrap();
            let route = Route::on_link(IpAddr::from(pod.address).into(), link, 3);
            RouteSocket::open().unwrap().change(&Change::AddRoute(route)).unwrap();
            interface.host_interface
        };
        let interface = self.node.namespace.run(connect).unwrap();
        self.keep_result(pod, "eth0", &interface);
        interface
    }

    /// The result of a plugin for an interface of the pod, with the one that it names on the host.
    fn keep_result(&self, pod: &Pod, inside: &str, interface: &str) {
        let result = json!({
            "containerId": pod.container_id, "ifName": inside,
            "cniArgs": [["K8S_POD_NAMESPACE", "demo"], ["K8S_POD_NAME", pod.name]],
            "result": {
                "interfaces": [{"name": interface}, {"name": inside, "sandbox": "/run/netns/x"}],
                "ips": [{"address": format!("{}/32", pod.address), "interface": 1}],
            },
        });
        std::fs::write(self.folder.path().join("results").join(&pod.name), result.to_string()).unwrap();
    }

    /// The API has the pod.
    fn report(&mut self, pod: &Pod, program: EndpointProgram) -> Report {
        let endpoint = Endpoint {
            container_id: "".into(),
            host_interface: "".into(),
            addresses: vec![pod.address.into()],
            mac: None,
            host_ports: Default::default(),
            program: Arc::new(program),
        };
        self.node.change(|state| drop(state.endpoints.insert(pod.id(), Arc::new(endpoint))))
    }

    /// Whether the results are a folder that the agent can read.
    fn show_results(&self, are_readable: bool) {
        let (results, kept) = (self.folder.path().join("results"), self.folder.path().join("kept"));
        if are_readable {
            std::fs::remove_file(&results).unwrap();
            std::fs::rename(&kept, &results).unwrap();
        } else {
            std::fs::rename(&results, &kept).unwrap();
            std::fs::write(&results, "no folder").unwrap();
        }
    }

    /// The first call of a new process, for a state that has changed meanwhile.
    fn start_agent(&mut self, change: impl FnOnce(&mut NodeState)) -> Report {
        change(&mut self.node.state);
        let config = self.config.clone();
        let open = || Stateful::new(Dataplane::open(config).unwrap());
        let elsewhere = tortie_kernel::namespace::NetNs::create().unwrap();
        let idle = elsewhere.run(|| Stateful::new(Dataplane::open(Config::default()).unwrap())).unwrap();
        drop(std::mem::replace(&mut self.node.dataplane, idle));
        self.node.dataplane = self.node.namespace.run(open).unwrap();
        let deltas = crate::common::deltas(&NodeState::default(), &self.node.state);
        self.node.apply(&deltas)
    }

    fn look(&mut self) -> Option<Report> {
        let (dataplane, state) = (&mut self.node.dataplane, &self.node.state);
        self.node.namespace.run(|| tortie_dataplane::Dataplane::look(&mut **dataplane, state)).unwrap()
    }
}

/// Policy has changed while the agent could not see whose the interfaces are.
#[test]
fn flows_that_policy_denies_are_cut_when_the_results_can_be_read_again() {
    for looks_before in [true, false] {
        let mut foreign = Foreign::new();
        let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
        server.serve(80);
        [&client, &server].into_iter().for_each(|pod| drop(foreign.attach(pod)));
        foreign.node.change(|state| {
            Arc::make_mut(&mut state.settings).established_flows = EstablishedFlows::Cut;
        });
        assert_eq!(foreign.report(&client, open()), Report::default());
        assert_eq!(foreign.report(&server, open()), Report::default());
        let stream = client.connect(server.address, 80).unwrap();
        assert!(answers(&stream));

        foreign.show_results(false);
        let report = foreign.start_agent(|state| {
            let server = state.endpoints.get_mut(&server.id()).unwrap();
            Arc::make_mut(server).program = Arc::new(ingress(&["closed"], EndOfTier::Deny));
        });
        assert_eq!(report.node[0].reason, Reason::PolicyNotInForce, "{report:?}");
        assert!(answers(&stream), "the table of before stays");
        foreign.show_results(true);
        if looks_before {
            assert_eq!(foreign.look(), None, "the table is still that of before");
        }
        assert_eq!(foreign.node.resync(), Report::default());
        assert!(client.is_cut_off(server.address, 80));
        let deadline = Instant::now() + Duration::from_secs(15);
        stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        while answers(&stream) {
            assert!(Instant::now() < deadline, "the flow goes on, looked before: {looks_before}");
        }
    }
}

/// The thread was busy, so the comparison with the kernel sees the pod's interface first.
#[test]
fn connections_of_a_pod_that_a_resync_recognises_are_forgotten_by_that_resync_only() {
    let mut foreign = Foreign::new();
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    server.serve(80);
    let report = foreign.report(&server, open());
    assert_eq!(report.endpoints[&server.id()][0].reason, Reason::InterfaceMissing);
    foreign.report(&client, open());
    [&client, &server].into_iter().for_each(|pod| drop(foreign.attach(pod)));
    assert_eq!(foreign.node.resync(), Report::default());
    let stream = client.connect(server.address, 80).unwrap();
    assert!(answers(&stream));
    let count = entries(&foreign.node);
    assert_eq!(foreign.node.apply(&[]), Report::default());
    assert_eq!(entries(&foreign.node), count, "the connection began when policy was in force");
}

/// An interface of the node has networks. One of a pod that gets one stays closed, and the node's adapter stays open whatever plugins
/// have answered.
#[test]
fn a_network_on_an_interface_opens_no_pod_and_closes_no_adapter() {
    let mut foreign = Foreign::new();
    let (client, server, beside) =
        (Pod::new("client", 1, 2), Pod::new("server", 1, 3), Pod::new("beside", 1, 4));
    server.serve(80);
    let [_, interface] = [&client, &server].map(|pod| foreign.attach(pod));
    foreign.node.change(|state| state.node = Some(LocalNode::ipv4("node-1", node_address(1), None)));
    foreign.report(&client, open());
    assert_eq!(foreign.report(&server, ingress(&["closed"], EndOfTier::Deny)), Report::default());
    foreign.keep_result(&beside, "net1", "eth0");
    let change = |foreign: &Foreign, change: &(dyn Fn(u32) -> Change + Sync), interface: &str| {
        let change = || {
            let link = interface_index(interface).unwrap();
            RouteSocket::open().unwrap().change(&change(link)).unwrap();
        };
        foreign.node.namespace.run(change).unwrap();
    };
    let add_route = |foreign: &Foreign, pod: &Pod, interface: &str| {
        let route = |link| Change::AddRoute(Route::on_link(IpAddr::from(pod.address).into(), link, 3));
        change(foreign, &route, interface);
    };
    add_route(&foreign, &beside, "eth0");
    let network = |link| Address { link, address: "192.0.2.1".parse().unwrap(), prefix_length: 24 };
    change(&foreign, &|link| Change::AddAddress(network(link)), &interface);
    let report = foreign.node.resync();
    let conditions = &report.endpoints[&server.id()];
    assert!(conditions[0].message.contains(&format!("{interface} is closed")), "{report:?}");
    let closed = || {
        let table = Nft::open().unwrap().list("tortie").unwrap().unwrap();
        format!("{:?}", table.sets["odd-interfaces"].elements.keys())
    };
    let closed = foreign.node.namespace.run(closed).unwrap();
    assert!(closed.contains(&interface) && !closed.contains("eth0"), "{closed}");
    assert!(client.is_cut_off(server.address, 80));
    change(&foreign, &|link| Change::DeleteAddress(network(link)), &interface);
    // The kernel removes it with the last address of an interface.
    add_route(&foreign, &server, &interface);
    foreign.node.program(&server, open());
    assert!(client.reaches(&server, 80));
}
