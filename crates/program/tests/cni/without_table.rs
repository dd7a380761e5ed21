//! Agents that start on a node without a table of policy while the datastore does not answer.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_kernel::nftables::{Nft, Table};

use crate::foreign_plugin::{self, AGENT, BLOCKED, PORT, connects, listen, reaches, until_reaches};
use crate::node::{Node, Sandbox, address, output_of, until};

/// A node with pods of which a policy denies ingress, egress, or nothing.
struct Pods {
    node: Node,
    all: Vec<(Sandbox, Ipv4Addr)>,
}

const NO_INGRESS: usize = 0;
const NO_EGRESS: usize = 1;
const FREE: usize = 2;
const OTHER: usize = 3;

impl Pods {
    fn new(options: &[&str]) -> Self {
        let node = Node::with_options(&json!([]), options, |node| {
            for direction in ["Ingress", "Egress"] {
                let (name, selector) = (direction.to_lowercase(), format!("no-{}", direction.to_lowercase()));
                let spec =
                    json!({"podSelector": {"matchLabels": {"is": selector}}, "policyTypes": [direction]});
                let key = Key::namespaced(Kind::KubernetesNetworkPolicy, "n", &name);
                node.put(&key, json!({"metadata": {"name": name, "namespace": "n"}, "spec": spec}));
            }
        });
        until("the network configuration", || node.configuration_file().exists());
        let all = ["no-ingress", "no-egress", "free", "other"].map(|name| {
            let sandbox = node.labelled_pod(name, json!({"is": name}));
            let result = node.call("ADD", &sandbox, json!({})).unwrap();
            (sandbox, address(&result))
        });
        Self { node, all: all.into() }
    }

    fn connects(&self, from: usize, to: usize) -> bool {
        let (to, address) = &self.all[to];
        connects(&self.all[from].0.netns, &to.netns, *address)
    }

    /// Which pods connect to which ones: from, to.
    fn connections(&self) -> Vec<(usize, usize)> {
        let at = |pod: usize| SocketAddr::new(self.all[pod].1.into(), PORT);
        let count = self.all.len();
        let _listeners: Vec<_> = (0..count).map(|pod| listen(&self.all[pod].0.netns, at(pod))).collect();
        let pairs = (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
        let connects = |from: usize, to: usize| {
            let connected = || TcpStream::connect_timeout(&at(to), BLOCKED).is_ok();
            self.all[from].0.netns.run(connected).unwrap()
        };
        std::thread::scope(|scope| {
            let pairs = pairs.filter(|(from, to)| from != to);
            let tries: Vec<_> =
                pairs.map(|(from, to)| ((from, to), scope.spawn(move || connects(from, to)))).collect();
            let tries = tries.into_iter().map(|(pair, connected)| (pair, connected.join().unwrap()));
            tries.filter(|(_, connected)| *connected).map(|(pair, _)| pair).collect()
        })
    }

    fn flush(&self) {
        assert_eq!(output_of(&self.node.namespace, "nft", &["flush", "ruleset"]), "");
    }

    fn is_closed(&self) -> bool {
        !self.connects(OTHER, NO_INGRESS) && !self.connects(NO_EGRESS, OTHER)
    }
}

/// The connections while both policies are in force.
const ALLOWED: [(usize, usize); 7] = [
    (NO_INGRESS, NO_EGRESS),
    (NO_INGRESS, FREE),
    (NO_INGRESS, OTHER),
    (FREE, NO_EGRESS),
    (FREE, OTHER),
    (OTHER, NO_EGRESS),
    (OTHER, FREE),
];

#[test]
fn pods_with_policy_are_closed_until_the_datastore_answers() {
    let mut pods = Pods::new(&[]);
    assert_eq!(pods.connections(), ALLOWED);
    pods.node.kill_agent();
    pods.node.stop_store();
    pods.flush();
    assert!(!pods.is_closed(), "nobody enforces policy");

    pods.node.start_agent();
    until("the pods with policy are closed", || pods.is_closed());
    assert_eq!(pods.connections(), ALLOWED, "directions without policy are open");
    let node_reaches = connects(&pods.node.namespace, &pods.all[NO_INGRESS].0.netns, pods.all[NO_INGRESS].1);
    assert!(node_reaches, "the kubelet's probes");
    assert!(pods.node.log().contains("the node had no policy"), "{}", pods.node.log());

    // While the agent waits, too.
    pods.node.kill_agent();
    pods.flush();
    pods.node.start_agent();
    until("the pods with policy are closed again", || pods.is_closed());

    pods.node.serve_store();
    until("the agent is ready", || pods.node.call("STATUS", &pods.all[FREE].0, json!({})).is_ok());
    assert_eq!(pods.connections(), ALLOWED);
    // The table is the dataplane's: it changes.
    pods.node.delete(&Key::namespaced(Kind::KubernetesNetworkPolicy, "n", "ingress"));
    until("a deleted policy", || pods.connects(OTHER, NO_INGRESS));
}

/// The table of the earlier agent stays while the datastore does not answer. Somebody may remove it then.
#[test]
fn a_table_that_is_removed_while_the_agent_waits_is_replaced() {
    let mut pods = Pods::new(&[]);
    pods.node.kill_agent();
    pods.node.stop_store();
    pods.node.start_agent();
    until("the agent waits for the datastore", || {
        pods.node.log().matches("cannot read the Node").count() > 0
    });
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert_eq!(pods.connections(), ALLOWED, "the earlier table stays");
    assert!(!pods.node.log().contains("the node had no policy"));
    // The kernel lets nobody else remove it while this agent owns it.
    pods.node.kill_agent();
    pods.flush();
    pods.node.start_agent();
    until("the pods with policy are closed", || pods.is_closed());
    assert_eq!(pods.connections(), ALLOWED);
}

/// A table without rules judges nothing.
#[test]
fn a_table_that_lacks_rules_counts_as_none() {
    let mut pods = Pods::new(&[]);
    for chain in ["to-workload", "forward-from"] {
        pods.node.kill_agent();
        pods.node.stop_store();
        assert_eq!(output_of(&pods.node.namespace, "nft", &["flush", "chain", "inet", "tortie", chain]), "");
        assert!(!pods.is_closed(), "{chain}");
        pods.node.start_agent();
        until("the pods with policy are closed", || pods.is_closed());
        pods.node.serve_store();
        until("the agent is ready", || pods.node.call("STATUS", &pods.all[FREE].0, json!({})).is_ok());
    }
}

/// While no agent runs, everybody may remove the table. An agent that waits owns it, if the kernel can guard tables.
#[test]
fn an_agent_that_waits_guards_the_earlier_table() {
    let mut pods = Pods::new(&[]);
    let flags = |pods: &Pods| {
        pods.node.namespace.run(|| Nft::open().unwrap().flags("tortie").unwrap().unwrap()).unwrap()
    };
    if flags(&pods) != Table::GUARDED {
        eprintln!("NOT asked: this kernel cannot guard tables");
        return;
    }
    pods.node.kill_agent();
    pods.node.stop_store();
    assert_eq!(flags(&pods), Table::PERSIST);
    pods.node.start_agent();
    until("the agent owns the table", || flags(&pods) == Table::GUARDED);
    assert_ne!(output_of(&pods.node.namespace, "nft", &["delete", "table", "inet", "tortie"]), "");
    assert_eq!(pods.connections(), ALLOWED);
}

/// Without knowledge, everything is closed; without an earlier agent, nothing is.
#[test]
fn what_the_saved_state_does_not_prove_is_closed() {
    let mut pods = Pods::new(&[]);
    let path = pods.node.path("saved-state.json");
    let good = std::fs::read_to_string(&path).unwrap();
    let (header, rest) = good.split_once('\n').unwrap();
    let mut header: Value = serde_json::from_str(header).unwrap();
    header["boot_id"] = json!("another");
    let of_another_start = format!("{header}\n{rest}");
    pods.node.stop_store();
    let of_another_node = good.replacen("\"node\":\"one\"", "\"node\":\"two\"", 1);
    for (text, expected) in [
        (of_another_start, vec![]),
        (of_another_node, vec![]),
        (String::new(), vec![]),
        (good.replacen("\"egress\":[]", "\"egress\":[ ]", 1), vec![]),
        (good.clone(), ALLOWED.to_vec()),
    ] {
        pods.node.kill_agent();
        pods.flush();
        std::fs::write(&path, &text).unwrap();
        pods.node.start_agent();
        until("the pods with policy are closed", || pods.is_closed());
        assert_eq!(pods.connections(), expected, "{text:?}");
    }
    pods.node.kill_agent();
    pods.flush();
    std::fs::remove_file(&path).unwrap();
    pods.node.start_agent();
    until("the agent waits for the datastore", || {
        pods.node.log().matches("cannot read the Node").count() >= 5
    });
    assert!(!pods.is_closed(), "the pods may be those of another plugin");
}

#[test]
fn an_operator_may_leave_the_pods_open() {
    let mut pods = Pods::new(&["--until-datastore", "open"]);
    assert!(!pods.node.path("saved-state.json").exists());
    pods.node.kill_agent();
    pods.node.stop_store();
    pods.flush();
    pods.node.start_agent();
    until("the agent waits for the datastore", || {
        pods.node.log().matches("cannot read the Node").count() > 0
    });
    assert!(!pods.is_closed());
}

/// After a start of the machine, pods of another plugin may run before the agent. The credentials of this agent are missing.
#[test]
fn an_agent_that_cannot_run_closes_the_pods_of_another_plugin() {
    let Some(mut node) = foreign_plugin::Node::new() else { return };
    let server = node.pod("server", "many", &json!({"app": "closed"}));
    let client = node.pod("client", "many", &json!({"app": "client"}));
    node.close();
    until_reaches("policy denies", &client.netns, &server, false);
    node.kill_agent();
    let credentials = node.api.kubeconfig_of(AGENT);
    let aside = credentials.with_extension("aside");
    std::fs::rename(&credentials, &aside).unwrap();
    let saved = std::fs::read_to_string(node.path("saved-state.json")).unwrap();
    for (is_other_start, is_known) in [(false, true), (true, false)] {
        if is_other_start {
            let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
            std::fs::write(node.path("saved-state.json"), saved.replacen(boot_id.trim(), "another", 1))
                .unwrap();
        }
        assert_eq!(output_of(&node.host, "nft", &["flush", "ruleset"]), "");
        assert!(reaches(&client.netns, &server), "nobody enforces policy");
        let mut command = node.agent_command(&[]);
        let output = node.host.run(|| command.output().unwrap()).unwrap();
        assert!(!output.status.success(), "{output:?}");
        assert!(!reaches(&client.netns, &server));
        assert_eq!(reaches(&server.netns, &client), is_known);
        assert_eq!(reaches(&node.host, &server), is_known, "the node itself, as for probes");
    }
    // The table of the last agent does not name them. Nobody had looked when they came.
    let late = node.attach("late", "many");
    let mut command = node.agent_command(&[]);
    node.host.run(|| command.output().unwrap()).unwrap();
    assert!(!reaches(&node.outside, &late), "a pod that came after the first look");
    std::fs::rename(&aside, &credentials).unwrap();
    node.start_agent(&[]);
    until_reaches("the other direction has no policy", &server.netns, &client, true);
    assert!(!reaches(&client.netns, &server));
}
