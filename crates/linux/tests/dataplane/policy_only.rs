//! Policy for pods that another plugin has connected, when the agent's thread looks late or could not look before.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::TempDir;
use testkit::Stateful;
use tortie_api::calico::EstablishedFlows;
use tortie_dataplane::*;
use tortie_kernel::interface_index;
use tortie_kernel::route::{Change, Route, RouteSocket};
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

    /// What another plugin and the runtime do for a pod.
    fn attach(&mut self, pod: &Pod) {
        let connect = || {
            let interface = self.node.wiring.connect(&pod.attachment()).unwrap();
            assert!(self.node.wiring.wait_until_live(&interface, TIMEOUT));
            let link = interface_index(&interface.host_interface).unwrap();
            let route = Route::on_link(std::net::IpAddr::from(pod.address).into(), link, 3);
            RouteSocket::open().unwrap().change(&Change::AddRoute(route)).unwrap();
            interface.host_interface
        };
        let interface = self.node.namespace.run(connect).unwrap();
        let result = json!({
            "containerId": pod.container_id, "ifName": "eth0",
            "cniArgs": [["K8S_POD_NAMESPACE", "demo"], ["K8S_POD_NAME", pod.name]],
            "result": {
                "interfaces": [{"name": interface}, {"name": "eth0", "sandbox": "/run/netns/x"}],
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
        [&client, &server].into_iter().for_each(|pod| foreign.attach(pod));
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
    [&client, &server].into_iter().for_each(|pod| foreign.attach(pod));
    assert_eq!(foreign.node.resync(), Report::default());
    let stream = client.connect(server.address, 80).unwrap();
    assert!(answers(&stream));
    let count = entries(&foreign.node);
    assert_eq!(foreign.node.apply(&[]), Report::default());
    assert_eq!(entries(&foreign.node), count, "the connection began when policy was in force");
}
