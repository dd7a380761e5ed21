//! Removes what Tortie leaves in a node's network namespace.
//!
//! The order keeps closed what policy closes: the links of pods go first, and the table with their policy goes last.

use tortie_kernel::nftables::{Nft, Op, Transaction};
use tortie_kernel::route::{Change, Link, RouteSocket};

use crate::dataplane::{Config, OVERLAY_MARK, ROUTE_PROTOCOL};
use crate::wire;

/// Removes everything of Tortie from the calling thread's network namespace, and returns what it has removed. The agent
/// must have ended. The parameters of the kernel stay, because others may need them by now.
///
/// # Errors
/// The kernel refused something, for instance because an agent still owns the table. What was removed before stays removed.
pub fn remove_all(config: &Config) -> crate::Result<Vec<String>> {
    let mut removed = Vec::new();
    let mut nft = Nft::open()?;
    let table = nft.list(&config.table)?;
    if table.is_some() {
        // Before anything is removed: while an agent runs, it would repair everything except for the pods' links.
        nft.check_owner(&config.table)?;
    }
    let mut socket = RouteSocket::open()?;
    let links = socket.links()?;
    for link in links.iter().filter(|link| wire::is_own(link, &config.workload_prefix)) {
        delete(&mut socket, link)?;
        removed.push(format!("link {}", link.name));
    }
    let routes = socket.routes()?;
    for route in routes.iter().filter(|route| route.protocol == ROUTE_PROTOCOL) {
        // A route may have gone with its link.
        if let Err(error) = socket.change(&Change::DeleteRoute(*route))
            && ![Some(libc::ESRCH), Some(libc::ENODEV)].contains(&error.errno())
        {
            return Err(error.into());
        }
        removed.push(format!("route {}", route.destination));
    }
    // Calico's device has the same name.
    if let Some(link) =
        links.iter().find(|link| link.name == config.vxlan_device && link.alias == OVERLAY_MARK)
    {
        delete(&mut socket, link)?;
        removed.push(format!("link {}", link.name));
    }
    if table.is_some() {
        nft.commit(&Transaction { table: config.table.clone(), ops: vec![Op::DeleteTable] })?;
        removed.push(format!("nftables table inet {}", config.table));
    }
    Ok(removed)
}

/// Deletes a link, unless it has gone, for instance with its namespace.
fn delete(socket: &mut RouteSocket, link: &Link) -> crate::Result<()> {
    match socket.change(&Change::DeleteLink(link.index)) {
        Err(error) if error.errno() != Some(libc::ENODEV) => Err(error.into()),
        _ => Ok(()),
    }
}
