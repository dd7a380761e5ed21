//! What the kernel has in a node's network namespace, as text for people who look for a mistake.

use std::fmt::Write;

use tortie_kernel::nftables::others::Others;
use tortie_kernel::nftables::{Nft, Set, Table, element_text, rule_text};
use tortie_kernel::route::{Link, RouteSocket};

use crate::dataplane::Config;

/// How many objects of foreign tables are read.
const MOST_FOREIGN: usize = 200_000;

/// The name of a part, and its text, or why it could not be read.
type DiagnosticPart = (&'static str, crate::Result<String>);

/// Reads the calling thread's network namespace. A part that cannot be read does not hide the others.
#[must_use]
pub fn diagnostics(config: &Config) -> Vec<DiagnosticPart> {
    vec![
        ("nftables-own", own_table(config)),
        ("nftables-others", other_tables(config)),
        ("links", links()),
        ("addresses", addresses()),
        ("routes", routes()),
        ("neighbours", neighbours()),
        ("forwarding", forwarding()),
    ]
}

fn own_table(config: &Config) -> crate::Result<String> {
    let table = Nft::open()?.list(&config.table)?;
    Ok(match table {
        None => format!("table inet {} does not exist\n", config.table),
        Some(table) => table_text(&config.table, &table),
    })
}

fn table_text(name: &str, table: &Table) -> String {
    let mut text = format!("table inet {name} (flags {})\n", table.flags);
    for (name, Set { spec, elements }) in &table.sets {
        let _ = writeln!(text, "\nset {name}: {spec:?}, {} elements", elements.len());
        for (key, value) in elements {
            let _ = writeln!(text, "  {}", element_text(&spec.key, key, value));
        }
    }
    for (name, chain) in &table.chains {
        let base = chain.base.map(|base| format!(": {base:?}")).unwrap_or_default();
        let _ = writeln!(text, "\nchain {name}{base}");
        for rule in &chain.rules {
            let comment =
                if rule.comment.is_empty() { String::new() } else { format!(" # {}", rule.comment) };
            let _ = writeln!(text, "  {}{comment}", rule_text(rule));
        }
    }
    text
}

/// What the chains of foreign tables may do with packets.
fn other_tables(config: &Config) -> crate::Result<String> {
    let others = Others::read(&[&config.table], MOST_FOREIGN)?;
    let mut text = String::new();
    if others.cut_short {
        let _ = writeln!(text, "only the first {MOST_FOREIGN} objects were read");
    }
    for (id, table) in &others.tables {
        let _ = writeln!(
            text,
            "table {} of family {}{}",
            id.name,
            id.family,
            if table.dormant { ", dormant" } else { "" }
        );
        for (name, chain) in &table.chains {
            let base = chain.base.as_ref().map(|base| format!(" {base:?}")).unwrap_or_default();
            let _ = writeln!(text, "  chain {name}{base}: {:?}", chain.ends);
        }
    }
    Ok(text)
}

fn links() -> crate::Result<String> {
    let links = RouteSocket::open()?.links()?;
    Ok(lines(links.iter().map(|link| {
        let Link { index, name, kind, mtu, up, controller, peer, alias, vxlan, mac, carries_ipv4: _ } = link;
        let mac = mac.map(|mac| format!(" mac {mac}")).unwrap_or_default();
        let controller = controller.map(|index| format!(" port of {index}")).unwrap_or_default();
        let peer = peer.map(|index| format!(" peer {index}")).unwrap_or_default();
        let vxlan = vxlan.map(|vxlan| format!(" {vxlan:?}")).unwrap_or_default();
        let state = if *up { "up" } else { "down" };
        format!("{index} {name} {kind} {state} mtu {mtu}{mac}{controller}{peer}{vxlan} alias {alias:?}")
    })))
}

fn addresses() -> crate::Result<String> {
    let addresses = RouteSocket::open()?.addresses()?;
    Ok(lines(
        addresses.iter().map(|one| format!("{}/{} on link {}", one.address, one.prefix_length, one.link)),
    ))
}

fn routes() -> crate::Result<String> {
    let routes = RouteSocket::open()?.routes()?;
    Ok(lines(routes.iter().map(|route| {
        let source = route.source.map(|source| format!(" source {source}")).unwrap_or_default();
        format!("{route} metric {}{source}", route.metric)
    })))
}

fn neighbours() -> crate::Result<String> {
    let neighbours = RouteSocket::open()?.neighbours()?;
    Ok(lines(neighbours.iter().map(|one| format!("{} at {} on link {}", one.address, one.mac, one.link))))
}

/// The nodes behind VXLAN links.
fn forwarding() -> crate::Result<String> {
    let mut socket = RouteSocket::open()?;
    let mut all = Vec::new();
    for link in socket.links()?.iter().filter(|link| link.vxlan.is_some()) {
        let entries = socket.fdb(link.index)?;
        all.extend(
            entries.iter().map(|entry| format!("{}: {} behind {}", link.name, entry.mac, entry.destination)),
        );
    }
    Ok(lines(all.into_iter()))
}

fn lines(lines: impl Iterator<Item = String>) -> String {
    lines.map(|line| line + "\n").collect()
}
