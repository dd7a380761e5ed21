//! Removes what the agent leaves on a Windows node, once the agent has been removed.

use tortie_hcn::{Firewall, Hcn, IpHelper};

use crate::firewall_rules::Opening;
use crate::node_routes::{DIRECT, LEARNED, remove_all};
use crate::remove_anchor;

/// What was done. Each is a sentence.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cleanup {
    /// What is removed, or was not there.
    pub done: Vec<String>,
    /// What failed.
    pub failed: Vec<String>,
}

/// Removes the agent's rules of the firewall, its routes to pods, and the network that keeps the adapter's switch. What fails does not
/// keep the rest from being removed. `hcn` may be why HNS cannot be called.
pub fn clean_up(firewall: &dyn Firewall, ip: &dyn IpHelper, hcn: Result<&dyn Hcn, String>) -> Cleanup {
    let mut cleanup = Cleanup::default();
    for opening in Opening::ALL {
        let rule = opening.rule();
        match opening.remove(firewall) {
            Ok(true) => cleanup.done.push(format!("the rule {rule:?} is removed from the firewall")),
            Ok(false) => cleanup.done.push(format!("the rule {rule:?} is not in the firewall")),
            Err(error) => cleanup.failed.push(format!("the rule {rule:?} of the firewall: {error}")),
        }
    }
    for (metric, what) in [(DIRECT, "to nodes in the same network"), (LEARNED, "of BGP")] {
        match remove_all(ip, metric) {
            Ok(routes) => cleanup.done.push(format!("{routes} routes {what} removed")),
            Err(error) => cleanup.failed.push(format!("the routes {what}: {error}")),
        }
    }
    match hcn.and_then(|hcn| remove_anchor(hcn).map_err(|error| error.to_string())) {
        Ok(true) => cleanup.done.push("the network that kept the adapter's switch is removed".to_owned()),
        Ok(false) => {}
        Err(error) => cleanup.failed.push(format!("the network that keeps the adapter's switch: {error}")),
    }
    cleanup
}
