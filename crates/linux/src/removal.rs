//! Removes what Tortie leaves in a node's network namespace.
//!
//! The order keeps closed what policy closes: the links of pods go first, and the table with their policy goes last.

use tortie_kernel::nftables::{Nft, Op, Transaction};
use tortie_kernel::route::{Change, LinkSetting, Route, RouteSocket};

use crate::dataplane::{Config, OVERLAY_MARK, ROUTE_PROTOCOL, remove_ipip};
use crate::error::tolerate_gone;
use crate::{Error, calico, learned_routes, services, wire};

/// Removes everything of Tortie from the calling thread's network namespace, and returns what it has removed. The agent
/// must have ended. The parameters of the kernel stay, because others may need them by now.
///
/// # Errors
/// The kernel refused something, for instance because an agent still owns the table. What was removed before stays removed.
pub fn remove_all(config: &Config) -> crate::Result<Vec<String>> {
    let mut removed = Vec::new();
    let table = Table::of_ended_agent(config)?;
    let mut socket = RouteSocket::open()?;
    let links = socket.links()?;
    for link in links.iter().filter(|link| wire::is_own(link, &config.workload_prefix)) {
        tolerate_gone(socket.change(&Change::DeleteLink(link.index)))?;
        removed.push(format!("link {}", link.name));
    }
    let routes = socket.routes()?;
    let is_ours = |route: &&Route| [ROUTE_PROTOCOL, learned_routes::PROTOCOL].contains(&route.protocol);
    for route in routes.iter().filter(is_ours) {
        tolerate_gone(socket.change(&Change::DeleteRoute(route.clone())))?;
        removed.push(format!("route {}", route.destination));
    }
    // Calico's devices have the same names.
    let names = [&config.vxlan_device, &config.vxlan_v6_device];
    for link in links.iter().filter(|link| names.contains(&&link.name) && link.alias == OVERLAY_MARK) {
        tolerate_gone(socket.change(&Change::DeleteLink(link.index)))?;
        removed.push(format!("link {}", link.name));
    }
    if remove_ipip(&config.ipip_device, &mut socket)? {
        removed.push(format!("link {}", config.ipip_device));
    }
    removed.extend(remove_services()?);
    removed.extend(table.delete()?);
    Ok(removed)
}

/// Leaves pods, routes and the VXLAN link to Calico, as Calico leaves its own, and removes the policy. Returns what it has
/// done. Pods keep their connections. Tortie's agent must have ended.
///
/// # Errors
/// Calico does not run here, so that pods would lose all policy; or as [`remove_all`].
pub fn hand_over_to_calico(config: &Config) -> crate::Result<Vec<String>> {
    if calico::running().is_none() {
        return Err(Error::CalicoMissing);
    }
    let table = Table::of_ended_agent(config)?;
    let mut done = Vec::new();
    let mut socket = RouteSocket::open()?;
    for route in socket.routes()? {
        let protocol = match route.protocol {
            ROUTE_PROTOCOL => calico::PROTOCOL,
            // Calico's BIRD replaces them when it has learned its own.
            learned_routes::PROTOCOL => calico::BIRD_PROTOCOL,
            _ => continue,
        };
        let change = Change::ReplaceRoute(Route { protocol, ..route.clone() });
        tolerate_gone(socket.change(&change))?;
        done.push(format!("left the {route} to Calico"));
    }
    for link in socket.links()? {
        if link.alias == OVERLAY_MARK || wire::is_own(&link, &config.workload_prefix) {
            // Calico's links have no alias.
            let unmarked = vec![LinkSetting::Alias(String::new())];
            tolerate_gone(socket.change(&Change::SetLink(link.index, unmarked)))?;
            done.push(format!("left link {} to Calico", link.name));
        }
    }
    done.extend(remove_services()?);
    done.extend(table.delete()?);
    Ok(done)
}

/// Removes the table of Services, and returns its name.
fn remove_services() -> crate::Result<Option<String>> {
    Ok(services::remove()?.then(|| format!("nftables table inet {}", services::TABLE)))
}

/// Tortie's table of policy, if it exists.
struct Table(Option<(Nft, String)>);

impl Table {
    /// An error if an agent runs: it would repair everything except for the pods' links.
    fn of_ended_agent(config: &Config) -> crate::Result<Self> {
        let mut nft = Nft::open()?;
        if nft.list(&config.table)?.is_none() {
            return Ok(Self(None));
        }
        nft.check_owner(&config.table)?;
        Ok(Self(Some((nft, config.table.clone()))))
    }

    /// Deletes it, and returns its name.
    fn delete(self) -> crate::Result<Option<String>> {
        let Some((mut nft, table)) = self.0 else { return Ok(None) };
        nft.commit(&Transaction { table: table.clone(), ops: vec![Op::DeleteTable] })?;
        Ok(Some(format!("nftables table inet {table}")))
    }
}
