//! Connections of a pod to the BGP speakers of nodes.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rand::Rng as _;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use serde_json::Value;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{Route, RouteSocket};

use crate::attack::{Attack, Bounds, Outcome};
use crate::lab::{Lab, NODES};
use crate::process::{output, wait_until};

/// The description.
pub(crate) const ATTACK: Attack = Attack {
    name: "bgp",
    attacker: "a pod connects to port 179 of both nodes in both families, also by an address that the node translates to the speaker of \
               the other node, where natOutgoing hides the pod, and announces routes as the node",
    holds: "no connection is established, each agent keeps its session and learns no other route",
    run,
};

const BGP: u16 = 179;
/// A port of the other node that is open for all.
const OPEN: u16 = 8179;
/// The addresses that the node translates, as kube-proxy does for a Service with endpoints written by hand.
const SERVICES: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(10, 96, 200, 1)), IpAddr::V6(Ipv6Addr::new(0xfd96, 0, 0, 0, 0, 0, 0, 1))];
const OWN: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 11)), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 2, 0, 0, 0, 11))];
const OTHER: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 12)), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 2, 0, 0, 0, 12))];
/// How many connections a round tries, all at once.
const CONNECTIONS: usize = 48;
/// How long a connection may take. It takes less than a millisecond; the kernel repeats a SYN after a second.
const PATIENCE: Duration = Duration::from_millis(2500);
/// How long sessions and settings may take.
const SETTLED: Duration = Duration::from_secs(60);
/// The protocol of routes that agents learn.
const LEARNED: u8 = 85;

fn run(bounds: &mut Bounds) -> Result<Outcome> {
    let lab = Lab::with_pods(&bounds.program, &["--ipv6", "--bgp"])?;
    let nodes = [lab.netns_of_node(NODES[0])?, lab.netns_of_node(NODES[1])?];
    let pod = lab.netns_of_pod("attacker")?;
    let plain = r#"{"spec": {"vxlanMode": "Never"}}"#;
    lab.tortie(&["patch", "ippool", "default-ipv4-ippool", "--type", "merge", "-p", plain])?;
    let settled = wait_until(SETTLED, || {
        let established = NODES.iter().all(|node| session(&lab, node).is_some());
        Ok(established
            && nodes.iter().map(learned).collect::<Result<Vec<_>>>()?.iter().all(|it| !it.is_empty()))
    });
    ensure!(settled?, "the nodes have no sessions");
    translate(&nodes[0])?;
    let mut outcome = Outcome::default();
    controls(&pod, &nodes, &mut outcome)?;
    while bounds.another_round() {
        judge(&lab, &pod, &nodes, &mut bounds.random, &mut outcome)?;
    }
    // The guard is a setting.
    felix(&lab, "Allow")?;
    for to in [SocketAddr::new(OTHER[0], BGP), SocketAddr::new(SERVICES[0], 80)] {
        let connected =
            wait_until(SETTLED, || Ok(pod.run(|| TcpStream::connect_timeout(&to, PATIENCE).is_ok())?));
        outcome.control(connected?, &format!("a pod that may cannot connect to {to}"))?;
    }
    felix(&lab, "Drop")?;
    let established = wait_until(SETTLED, || Ok(NODES.iter().all(|node| session(&lab, node).is_some())));
    ensure!(established?, "the sessions do not come back");
    judge(&lab, &pod, &nodes, &mut bounds.random, &mut outcome)?;
    lab.down()?;
    Ok(outcome)
}

/// The speaker answers its peer, and the pod's connections to another port of its node arrive as those of the node.
fn controls(pod: &NetNs, nodes: &[NetNs; 2], outcome: &mut Outcome) -> Result<()> {
    let speaker = SocketAddr::new(OTHER[0], BGP);
    let answers = nodes[0].run(|| TcpStream::connect_timeout(&speaker, PATIENCE).is_ok())?;
    outcome.control(answers, "the speaker of the other node does not accept its peer")?;
    let listener = nodes[1].run(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, OPEN)))??;
    for (service, own) in SERVICES.into_iter().zip(OWN) {
        let service = SocketAddr::new(service, 81);
        let connected = pod.run(|| TcpStream::connect_timeout(&service, PATIENCE))?;
        outcome.control(connected.is_ok(), &format!("{service} is not translated: {connected:?}"))?;
        let (_, seen) = listener.accept()?;
        outcome.control(
            seen.ip().to_canonical() == own,
            &format!("natOutgoing does not hide the pod: {seen}"),
        )?;
    }
    Ok(())
}

fn judge(
    lab: &Lab,
    pod: &NetNs,
    nodes: &[NetNs; 2],
    random: &mut StdRng,
    outcome: &mut Outcome,
) -> Result<()> {
    let begun = Instant::now();
    let before = nodes.iter().map(learned).collect::<Result<Vec<_>>>()?;
    let ages = NODES.map(|node| session(lab, node));
    let direct = OWN.into_iter().chain(OTHER).map(|address| SocketAddr::new(address, BGP));
    let targets: Vec<_> = direct.chain(SERVICES.map(|service| SocketAddr::new(service, 80))).collect();
    let tries: Vec<_> =
        (0..CONNECTIONS).filter_map(|_| Some((*targets.choose(random)?, random.random::<bool>()))).collect();
    let connected = std::thread::scope(|scope| {
        let tries = tries.iter().map(|(to, talks)| scope.spawn(|| pod.run(|| attempt(*to, *talks))));
        let tries: Vec<_> = tries.collect();
        tries.into_iter().map(|thread| thread.join().ok()?.ok()?).collect::<Vec<_>>()
    });
    outcome.attempts += tries.len() as u64;
    connected.into_iter().flatten().for_each(|text| outcome.blame(text));
    for (index, node) in NODES.iter().enumerate() {
        let (age, after) = (session(lab, node), learned(&nodes[index])?);
        let least = ages[index].map(|age| age + begun.elapsed().as_secs().saturating_sub(1));
        if age.is_none() || age < least {
            outcome.blame(format!("{node} has lost its session: {age:?} s old, not {least:?}"));
        }
        if after != before[index] {
            outcome.blame(format!("{node} has other routes: {after:?}, not {:?}", before[index]));
        }
    }
    Ok(())
}

/// Connects, and says what was reached. A talking one announces a route, as the node whose address it has.
fn attempt(to: SocketAddr, talks: bool) -> Option<String> {
    let mut stream = TcpStream::connect_timeout(&to, PATIENCE).ok()?;
    let mut answer = [0; 64];
    let mut length = 0;
    if talks {
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        let _ = stream.write_all(&open_and_update());
        length = stream.read(&mut answer).unwrap_or_default();
    }
    Some(format!("a connection to {to}, with an answer of {length} bytes"))
}

/// OPEN of AS 64512, KEEPALIVE, and an UPDATE with the route 203.0.113.0/24 (RFC 4271).
fn open_and_update() -> Vec<u8> {
    let message = |kind: u8, body: &[u8]| {
        let length = u16::try_from(19 + body.len()).unwrap_or_default().to_be_bytes();
        [&[0xff; 16][..], &length, &[kind], body].concat()
    };
    let open = [&[4, 0xfc, 0, 0, 90, 192, 0, 2, 11, 8, 2, 6, 65, 4][..], &[0, 0, 0xfc, 0]].concat();
    let attributes =
        [&[0x40, 1, 1, 0, 0x40, 2, 0, 0x40, 3, 4, 192, 0, 2, 11][..], &[0x40, 5, 4, 0, 0, 0, 100]].concat();
    let length = u16::try_from(attributes.len()).unwrap_or_default().to_be_bytes();
    let update = [&[0, 0][..], &length, &attributes, &[24, 203, 0, 113]].concat();
    [message(1, &open), message(4, &[]), message(2, &update)].concat()
}

/// The node translates the addresses of [`SERVICES`]: port 80 to the speaker of the other node, port 81 to its open port.
fn translate(node: &NetNs) -> Result<()> {
    let table = |family: &str, service: IpAddr, other: String| {
        let rule = |port, to| format!("{family} daddr {service} tcp dport {port} dnat to {other}:{to}; ");
        format!(
            "table {family} by-hand {{ chain services {{ type nat hook prerouting priority -100; {}{} }}; }}\n",
            rule(80, BGP),
            rule(81, OPEN)
        )
    };
    for text in
        [table("ip", SERVICES[0], OTHER[0].to_string()), table("ip6", SERVICES[1], format!("[{}]", OTHER[1]))]
    {
        let mut nft = Command::new("nft");
        output(node.enter_on_spawn(nft.arg(text))?)?;
    }
    Ok(())
}

/// The age of a node's session, in seconds.
fn session(lab: &Lab, node: &str) -> Option<u64> {
    let peers = lab.json(&["bgp", "peers", "--node", node, "-o", "json"]).ok()?;
    let peers: Vec<&Value> = peers.as_array()?.iter().collect();
    let established = peers.iter().all(|peer| peer["state"] == "Established");
    let ages = peers.iter().map(|peer| peer["establishedSeconds"].as_u64());
    if established { ages.min().flatten() } else { None }
}

/// The routes that a node has learned.
fn learned(node: &NetNs) -> Result<BTreeSet<String>> {
    let routes = node.run(|| RouteSocket::open()?.routes())?.context("routes")?;
    let shown = |route: &Route| format!("{} via {:?}", route.destination, route.gateway);
    Ok(routes.iter().filter(|route| route.protocol == LEARNED).map(shown).collect())
}

fn felix(lab: &Lab, action: &str) -> Result<()> {
    lab.apply(&format!(
        "apiVersion: projectcalico.org/v3\nkind: FelixConfiguration\n\
         metadata: {{name: default, annotations: {{tortie.io/bgpFromPods: {action}}}}}\nspec: {{}}\n"
    ))
}
