//! `tortie bgp`: what the BGP speaker of this node knows.

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use ipnet::IpNet;
use tortie_agent::control::{
    Answer, Ask, BgpAdvertised, BgpOutcome, BgpPeer, BgpRoute, BgpWhy, Outcome, ask,
};

use crate::lab::{InLab, lab};
use crate::node_name::NodeName;
use crate::output::{self, Format};

#[derive(clap::Subcommand)]
pub(crate) enum BgpCommand {
    /// Show the peers of this node's speaker, and the state of their sessions
    Peers(Asking),
    /// Show the routes that this node's speaker has chosen
    Routes {
        /// Only routes to this network or address
        prefix: Option<String>,
        #[command(flatten)]
        asking: Asking,
    },
    /// Explain a route: each candidate and the step or filter that decided about it, what peers are told, and what the kernel has
    Why {
        /// The network or address
        prefix: String,
        #[command(flatten)]
        asking: Asking,
    },
}

#[derive(clap::Args)]
pub(crate) struct Asking {
    #[command(flatten)]
    lab: InLab<LabNode>,
    /// The socket of the agent
    #[arg(long, value_name = "PATH", default_value_os_t = tortie_cni::local::control_address())]
    agent_socket: PathBuf,
    /// The output format
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    output: Format,
}

#[derive(clap::Args)]
struct LabNode {
    /// In a lab: the node
    #[arg(long, value_name = "NODE", conflicts_with = "agent_socket")]
    node: Option<NodeName>,
}

impl BgpCommand {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        match self {
            Self::Peers(asking) => {
                let answer = asking.ask(Ask::BgpPeers)?;
                let Outcome::BgpPeers(peers) = answer.outcome else { bail!(other_question(&answer)) };
                match asking.output {
                    Format::Text => print_peers(&answer.node, &peers),
                    Format::Json => output::line(&serde_json::to_string_pretty(&peers)?),
                }
                Ok(ExitCode::SUCCESS)
            }
            Self::Routes { prefix, asking } => {
                let wanted = prefix.as_deref().map(network).transpose()?;
                let answer = asking.ask(Ask::BgpRoutes)?;
                let Outcome::BgpRoutes(mut routes) = answer.outcome else { bail!(other_question(&answer)) };
                if let Some(wanted) = wanted {
                    // As in a router: what decides about the packets, and what is more specific.
                    routes.retain(|route| route.prefix.contains(&wanted) || wanted.contains(&route.prefix));
                }
                match asking.output {
                    Format::Text => print_routes(&answer.node, &routes),
                    Format::Json => output::line(&serde_json::to_string_pretty(&routes)?),
                }
                Ok(ExitCode::SUCCESS)
            }
            Self::Why { prefix, asking } => {
                let answer = asking.ask(Ask::BgpWhy { network: network(&prefix)? })?;
                let Outcome::BgpWhy(why) = answer.outcome else { bail!(other_question(&answer)) };
                match (asking.output, &why) {
                    (Format::Json, why) => output::line(&serde_json::to_string_pretty(why)?),
                    (Format::Text, Some(why)) => print_why(&answer.node, why),
                    (Format::Text, None) => {
                        output::line(&format!("node {} knows no route to {prefix}", answer.node));
                    }
                }
                Ok(if why.is_some() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
            }
        }
    }
}

impl Asking {
    fn ask(&self, question: Ask) -> anyhow::Result<Answer> {
        let answer = ask(&self.socket()?, question)?;
        match answer.outcome {
            Outcome::Failed(problem) => bail!("node {}: {problem}", answer.node),
            _ => Ok(answer),
        }
    }

    fn socket(&self) -> anyhow::Result<PathBuf> {
        match (self.lab.0.as_ref().and_then(|lab| lab.node.as_ref()), lab()) {
            (Some(node), Some(lab)) => lab.agent_socket(node.as_str()),
            _ => Ok(self.agent_socket.clone()),
        }
    }
}

fn other_question(answer: &Answer) -> String {
    format!("node {}: the agent answers another question", answer.node)
}

/// A network, or an address as a network of its own.
fn network(text: &str) -> anyhow::Result<IpNet> {
    let address = || text.parse::<IpAddr>().map(IpNet::from).ok();
    match text.parse().ok().or_else(address) {
        Some(network) => Ok(network),
        None => bail!("{text:?} is neither an address nor a network such as 10.244.1.0/26"),
    }
}

fn print_peers(node: &str, peers: &[BgpPeer]) {
    if peers.is_empty() {
        output::line(&format!(
            "node {node} has no BGP peers: there is no other node, or the mesh is off and no BGPPeer selects it"
        ));
        return;
    }
    let mut rows =
        vec![["PEER", "AS", "STATE", "SINCE", "RECEIVED", "SENT", "LAST ERROR"].map(str::to_owned).to_vec()];
    rows.extend(peers.iter().map(|peer| {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        [
            peer.address.to_string(),
            or_dash(peer.as_number.map(|number| number.to_string())),
            peer.state.clone(),
            or_dash(peer.established_seconds.map(|seconds| format!("{seconds}s"))),
            peer.received.to_string(),
            peer.advertised.to_string(),
            or_dash(peer.last_error.clone()),
        ]
        .to_vec()
    }));
    output::columns(&rows);
}

/// Next hop, sender, preference, path and communities.
fn cells(route: &BgpRoute) -> [String; 5] {
    let or_dash = |text: String| if text.is_empty() { "-".to_owned() } else { text };
    let own = || "this node".to_owned();
    [
        if route.from.is_some() { route.next_hop.to_string() } else { own() },
        route.from.map_or_else(own, |peer| peer.to_string()),
        or_dash(route.local_preference.map(|number| number.to_string()).unwrap_or_default()),
        or_dash(route.as_path.clone()),
        or_dash(route.communities.join(" ")),
    ]
}

fn print_why(node: &str, why: &BgpWhy) {
    output::line(&format!("node {node}, {}: all routes, the best one first", why.prefix));
    let titles = ["OUTCOME", "NEXT HOP", "FROM", "PREFERENCE", "AS PATH", "COMMUNITIES", "REASON"];
    let mut rows = vec![titles.map(str::to_owned).to_vec()];
    rows.extend(why.candidates.iter().map(|candidate| {
        let outcome = match candidate.outcome {
            BgpOutcome::Best => "best",
            BgpOutcome::AsGood => "as good",
            BgpOutcome::Worse => "worse",
            BgpOutcome::Rejected => "rejected",
            BgpOutcome::NotUsable => "not usable",
            BgpOutcome::NextHopUnreachable => "unreachable",
        };
        let stale = if candidate.stale { "; from before the peer's restart" } else { "" };
        let reason = format!("{}{stale}", candidate.reason);
        [outcome.to_owned()].into_iter().chain(cells(&candidate.route)).chain([reason]).collect()
    }));
    output::columns(&rows);
    if !why.peers.is_empty() {
        output::line("peers are told:");
    }
    let mut rows = vec![["PEER", "NEXT HOP", "REASON"].map(str::to_owned).to_vec()];
    rows.extend(why.peers.iter().map(|BgpAdvertised { peer, next_hop, reason }| {
        let told = next_hop.map_or_else(|| "nothing".to_owned(), |next_hop| next_hop.to_string());
        vec![peer.to_string(), told, reason.clone().unwrap_or_else(|| "-".to_owned())]
    }));
    if rows.len() > 1 {
        output::columns(&rows);
    }
    let kernel = &why.kernel;
    output::line(&format!("kernel: {}", kernel.route.as_deref().unwrap_or("no route of BGP")));
    if let Some(reason) = &kernel.reason {
        output::line(&format!("  {reason}"));
    }
    for other in &kernel.others {
        output::line(&format!("  of others: {other}"));
    }
}

fn print_routes(node: &str, routes: &[BgpRoute]) {
    if routes.is_empty() {
        output::line(&format!("node {node} has no such route"));
        return;
    }
    let titles = ["PREFIX", "NEXT HOP", "FROM", "PREFERENCE", "AS PATH", "COMMUNITIES"];
    let mut rows = vec![titles.map(str::to_owned).to_vec()];
    rows.extend(
        routes.iter().map(|route| [route.prefix.to_string()].into_iter().chain(cells(route)).collect()),
    );
    output::columns(&rows);
}
