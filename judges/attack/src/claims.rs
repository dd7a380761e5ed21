//! Annotations of a user of one namespace that name addresses of others.

use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rand::seq::IndexedRandom as _;
use tortie_kernel::namespace::NetNs;

use crate::attack::{Attack, Bounds, Outcome};
use crate::lab::{Lab, NAMESPACE, NODES};
use crate::process::wait_until;

/// The description.
pub(crate) const ATTACK: Attack = Attack {
    name: "claims",
    attacker: "a user of a Kubernetes namespace creates pods with the labels that policies admit, which never run, and names in their \
               annotations the addresses of pods and nodes that policies do not admit, and of those that they do",
    holds: "no verdict changes, in either direction",
    run,
};

/// The label that the policy of the neighbour admits.
const POLICY: &str = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: friends, namespace: attack}\n\
    spec: {podSelector: {matchLabels: {app: neighbour}}, ingress: [{from: [{podSelector: {matchLabels: {role: friend}}}]}]}\n";
const CONNECT: Duration = Duration::from_millis(1500);
const BOUND: Duration = Duration::from_secs(60);
/// How many claims a round makes.
const CLAIMS: usize = 8;

fn run(bounds: &mut Bounds) -> Result<Outcome> {
    setup::packages::servers()?;
    let lab = Lab::with_pods(&bounds.program, &["--datastore", "kubernetes"])?;
    let stage = Stage::new(&lab)?;
    let mut outcome = Outcome::default();
    lab.tortie(&["label", "pod", "remote", "-n", NAMESPACE, "role=friend"])?;
    lab.apply(POLICY)?;
    let is_in_force = wait_until(BOUND, || Ok(stage.verdicts()? == [false, true]))?;
    outcome.control(is_in_force, "the policy is not in force")?;
    while bounds.another_round() {
        for number in 0..CLAIMS {
            let victim = *stage.victims.choose(&mut bounds.random).context("no victim")?;
            let role = *["friend", "none"].choose(&mut bounds.random).context("no role")?;
            let node = *NODES.choose(&mut bounds.random).context("no node")?;
            claim(&lab, &stage, number, victim, role, node, &mut outcome)?;
        }
    }
    // The label itself opens, so the policy is what decides.
    lab.tortie(&["label", "pod", "attacker", "-n", NAMESPACE, "role=friend"])?;
    let opened = wait_until(BOUND, || Ok(stage.verdicts()? == [true, true]))?;
    outcome.control(opened, "the label of a pod that runs opens nothing")?;
    lab.down()?;
    Ok(outcome)
}

/// A pod claims an address.
fn claim(
    lab: &Lab,
    stage: &Stage,
    number: usize,
    victim: IpAddr,
    role: &str,
    node: &str,
    outcome: &mut Outcome,
) -> Result<()> {
    let name = format!("thief-{number}");
    let _ = lab.tortie(&["lab", "kubectl", "delete", "pod", &name, "-n", NAMESPACE, "--now"]);
    // It asks for an address of no pool, so it never gets one, and no kubelet ever reports another address than the annotation.
    let manifest = format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\n  namespace: {NAMESPACE}\n  labels: {{app: thief, role: {role}}}\n\
         \x20 annotations: {{cni.projectcalico.org/ipAddrs: '[\"203.0.113.9\"]', cni.projectcalico.org/podIPs: {victim}/32, \
         cni.projectcalico.org/podIP: {victim}/32, cni.projectcalico.org/containerID: thief}}\n\
         spec:\n  nodeName: {node}\n  containers: [{{name: c, image: none}}]\n"
    );
    lab.kubectl_apply(&manifest)?;
    outcome.attempts += 1;
    let mut reported = String::new();
    let noticed = wait_until(BOUND, || {
        reported = lab.conditions(node)?.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        Ok(reported.contains(&name))
    })?;
    outcome.control(noticed, &format!("the node {node} takes no notice of {name}: {reported}"))?;
    let verdicts = stage.verdicts()?;
    if verdicts != [false, true] {
        outcome.blame(format!("{name} ({role}, on {node}) claims {victim}: the verdicts are {verdicts:?}"));
    }
    Ok(())
}

/// Two clients, of which the policy of the neighbour admits the second one only.
struct Stage {
    clients: [NetNs; 2],
    to: SocketAddr,
    /// The addresses that are claimed.
    victims: Vec<IpAddr>,
}

impl Stage {
    fn new(lab: &Lab) -> Result<Self> {
        let address = |name: &str| lab.addresses(name)?.first().copied().context("no address");
        let to = SocketAddr::new(address("neighbour")?, 80);
        let clients = [lab.netns_of_pod("attacker")?, lab.netns_of_pod("remote")?];
        let victims = vec![address("attacker")?, address("remote")?, to.ip(), "192.0.2.12".parse()?];
        ensure!(victims.iter().all(IpAddr::is_ipv4), "claims are of IPv4 addresses");
        Ok(Self { clients, to, victims })
    }

    /// Who reaches the neighbour.
    fn verdicts(&self) -> Result<[bool; 2]> {
        let reaches = |client: &NetNs| client.run(|| TcpStream::connect_timeout(&self.to, CONNECT).is_ok());
        Ok([reaches(&self.clients[0])?, reaches(&self.clients[1])?])
    }
}
