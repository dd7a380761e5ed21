//! The machine under HNS: the adapter of the overlay network, and the node's own addresses.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ipnet::{IpNet, Ipv4Net};
use tortie_hcn::{Adapter, Guid, IpHelper, IpHelperError, NoIpHelper};
use tracing::warn;

use crate::adapter::{AdapterSelector, is_virtual, switch, usable};
use crate::firewall_opening::FirewallOpenings;
use crate::host_routes::{HostRoutes, KeepFor};
use crate::network_lock::NetworkLock;
use crate::node_routes::{DesiredRoutes, Surplus};
use crate::saved_report::SavedReport;
use crate::{Error, node_routes};

/// Why no network is made or replaced while nothing tells its adapter: HNS would choose one.
const ADDRESS_UNKNOWN: &str = "the node's address, which tells the adapter, is not known yet";

/// The machine of a node. Clones share what is known of its routes.
#[derive(Clone)]
pub struct Host {
    ip: Arc<dyn IpHelper>,
    selector: Option<AdapterSelector>,
    routes: Arc<HostRoutes>,
    firewall: Option<FirewallOpenings>,
    selftest: Option<SavedReport>,
    /// Whether a second network may keep the switch, for instance one of an earlier process.
    anchored: Arc<AtomicBool>,
    ipv6: Arc<Mutex<Ipv6State>>,
    network_lock: NetworkLock,
    host_route: Arc<Mutex<Option<HostRouteAnswer>>>,
}

/// The network to which a HostRoute policy was sent, and why HNS refused it.
type HostRouteAnswer = (Guid, Option<String>);

/// Why the node's network has no IPv6.
#[derive(Debug, Default)]
struct Ipv6State {
    /// HNS has refused it. It is tried again when the agent starts again.
    refused: Option<String>,
    /// The node has no IPv6 block, although a pool is for it.
    lack: Option<String>,
    /// No pool is for the node any more. The node may still have a block, and its network may lack it.
    is_unwanted: bool,
}

/// The adapter for a network.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Choice {
    /// The name that HNS gets, and that an existing network should have; `None` lets HNS choose.
    pub(crate) name: Option<String>,
    /// The adapter, if it can be used.
    pub(crate) adapter: Option<Adapter>,
    /// Why no network may be made.
    pub(crate) refused: Option<String>,
}

impl Choice {
    fn refused(name: Option<String>, why: String) -> Choice {
        Choice { name, adapter: None, refused: Some(why) }
    }
}

impl Host {
    /// A machine. Without a selector, the adapter is that with the node's address.
    pub fn new(ip: Arc<dyn IpHelper>, selector: Option<AdapterSelector>, routes: Arc<HostRoutes>) -> Host {
        let anchored = Arc::new(AtomicBool::new(true));
        Host {
            ip,
            selector,
            routes,
            firewall: None,
            selftest: None,
            anchored,
            ipv6: Arc::default(),
            network_lock: NetworkLock::default(),
            host_route: Arc::default(),
        }
    }

    /// A machine about which nothing is known: HNS chooses the adapter.
    pub fn unknown() -> Host {
        let ip: Arc<dyn IpHelper> = Arc::new(NoIpHelper);
        Host::new(ip.clone(), None, Arc::new(HostRoutes::new(ip, None)))
    }

    /// Adds the openings of the machine's firewall.
    #[must_use]
    pub fn with_firewall(self, firewall: FirewallOpenings) -> Host {
        Host { firewall: Some(firewall), ..self }
    }

    /// The openings of the machine's firewall, if it has one.
    pub fn firewall(&self) -> Option<&FirewallOpenings> {
        self.firewall.as_ref()
    }

    /// Adds the report of a selftest of this machine's HNS.
    #[must_use]
    pub fn with_selftest(self, selftest: SavedReport) -> Host {
        Host { selftest: Some(selftest), ..self }
    }

    /// The report, if there may be one.
    pub(crate) fn selftest(&self) -> Option<&SavedReport> {
        self.selftest.as_ref()
    }

    /// Whether somebody has chosen the adapter.
    pub fn has_selector(&self) -> bool {
        self.selector.is_some()
    }

    /// The machine's routes.
    pub fn routes(&self) -> &HostRoutes {
        &self.routes
    }

    /// Calls `notify` after changes of addresses or routes.
    pub fn watch(&self, notify: Box<dyn Fn() + Send + Sync>) {
        self.ip.watch(notify);
    }

    /// Every IPv4 address of the machine that pods can see, with its network; `None` if the system does not tell them.
    pub(crate) fn addresses(&self) -> Option<BTreeSet<Ipv4Net>> {
        let read =
            self.ip.adapters().inspect_err(|error| warn!(%error, "the last known addresses stay in use"));
        let adapters = read.ok()?;
        Some(adapters.iter().flat_map(usable).collect())
    }

    /// The lock of the network, for [`WindowsWiring`](crate::WindowsWiring).
    pub fn network_lock(&self) -> &NetworkLock {
        &self.network_lock
    }

    /// What HNS has answered to the HostRoute policy for this network, if it was sent: why it refused it, if it did.
    pub(crate) fn host_route_answer(&self, network: Guid) -> Option<Option<String>> {
        let last = self.host_route.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref().filter(|(id, _)| *id == network).map(|(_, answer)| answer.clone())
    }

    pub(crate) fn set_host_route_answer(&self, network: Guid, answer: Option<String>) {
        *self.host_route.lock().unwrap_or_else(PoisonError::into_inner) = Some((network, answer));
    }

    pub(crate) fn may_be_anchored(&self) -> bool {
        self.anchored.load(Ordering::Relaxed)
    }

    pub(crate) fn set_anchored(&self, anchored: bool) {
        self.anchored.store(anchored, Ordering::Relaxed);
    }

    pub(crate) fn ipv6_refused(&self) -> Option<String> {
        self.ipv6_state().refused.clone()
    }

    pub(crate) fn refuse_ipv6(&self, why: String) {
        warn!(why, "the pods of this node have no IPv6; the agent tries again when it starts again");
        self.ipv6_state().refused = Some(why);
    }

    /// Why the network has no IPv6, whoever is the cause. What HNS has refused once says nothing to a node without an IPv6 block.
    pub(crate) fn without_ipv6(&self, has_block: bool) -> Option<String> {
        let state = self.ipv6_state();
        state.refused.clone().filter(|_| has_block).or_else(|| state.lack.clone())
    }

    /// Whether pods of the node should have IPv6. If nobody has said so, the node's blocks tell.
    pub(crate) fn wants_ipv6(&self) -> bool {
        !self.ipv6_state().is_unwanted
    }

    /// Records whether an IPv6 pool is for the node. Without one, nobody misses IPv6, and the node's conditions do not name it.
    pub fn set_ipv6_wanted(&self, is_wanted: bool) {
        self.ipv6_state().is_unwanted = !is_wanted;
    }

    /// Records why the node has no IPv6 block, for its conditions; `None` if it has one, or needs none.
    pub fn set_ipv6_lack(&self, lack: Option<String>) {
        self.ipv6_state().lack = lack;
    }

    fn ipv6_state(&self) -> MutexGuard<'_, Ipv6State> {
        self.ipv6.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The machine's adapters and routes.
    pub fn ip(&self) -> &dyn IpHelper {
        &*self.ip
    }

    /// Makes the machine forward packets of each address's family between the adapters with these addresses, and gives it routes
    /// ([`node_routes::sync`]). Returns what is not in force.
    ///
    /// # Errors
    /// The machine does not tell its adapters or routes.
    pub(crate) fn sync_routes(
        &self,
        ends: &[IpAddr],
        metric: u32,
        desired: &DesiredRoutes,
    ) -> Result<Vec<String>, IpHelperError> {
        let adapters = self.ip.adapters()?;
        let mut problems = Vec::new();
        for end in ends {
            match with(&adapters, *end)[..] {
                [] => problems.push(format!("no adapter of the node has the address {end} yet")),
                [adapter, ..] => {
                    let enabled = self.ip.enable_forwarding(adapter.index, end.is_ipv6());
                    problems.extend(enabled.err().map(|error| format!("{}: {error}", adapter.name)));
                }
            }
        }
        problems.extend(node_routes::sync(&*self.ip, metric, desired, Surplus::Goes)?);
        Ok(problems)
    }

    /// The names of the adapters that are up, with their addresses; none if nothing is known about the machine.
    ///
    /// # Errors
    /// The system does not tell them.
    pub fn interfaces(&self) -> Result<Vec<(String, Vec<IpNet>)>, IpHelperError> {
        let up = self.ip.adapters()?.into_iter().filter(|adapter| adapter.is_up);
        Ok(up.map(|adapter| (adapter.name, adapter.addresses)).collect())
    }

    /// Whether anything is known about the machine.
    pub(crate) fn has_adapters(&self) -> bool {
        self.ip.adapters().is_ok_and(|adapters| !adapters.is_empty())
    }

    /// Whether the node's address tells which adapter a network belongs on.
    pub fn needs_address(&self) -> bool {
        self.selector.is_none() && self.has_adapters()
    }

    /// The adapter for a network of the node with this address.
    pub(crate) fn choose(&self, node: Option<Ipv4Addr>) -> Choice {
        let named = match &self.selector {
            Some(AdapterSelector::Name(name)) => Some(name.clone()),
            _ => None,
        };
        match self.ip.adapters() {
            // Nothing is known about the machine.
            Ok(adapters) if adapters.is_empty() => Choice { name: named, ..Choice::default() },
            Ok(adapters) => choose(&adapters, self.selector.as_ref(), node),
            Err(error) => Choice::refused(named, error.to_string()),
        }
    }

    /// Prepares for the end of a network: the adapter of its switch goes, and the system forgets routes.
    ///
    /// # Errors
    /// The routes cannot be kept, or nothing tells the adapter of the next network.
    pub(crate) fn prepare_for_deletion(&self, node: Option<Ipv4Addr>) -> Result<(), Error> {
        if node.is_none() && self.needs_address() {
            return Err(Error::Adapter { problem: ADDRESS_UNKNOWN.to_owned() });
        }
        match self.carrier(node)? {
            Some(adapter) => self.keep(&adapter, KeepFor::Deletion),
            None => Ok(()),
        }
    }

    /// Records that the network is there, and the routes of its adapter, in case it goes without the agent's doing.
    pub(crate) fn network_is_there(&self, node: Option<Ipv4Addr>) {
        self.routes.network_is_there(self.carrier(node).ok().flatten().as_ref());
    }

    /// The adapter that has the node's address, even if it cannot carry a network.
    fn carrier(&self, node: Option<Ipv4Addr>) -> Result<Option<Adapter>, Error> {
        let Choice { adapter, .. } = self.choose(node);
        let adapters = self.ip.adapters().map_err(|error| Error::Adapter { problem: error.to_string() })?;
        let has_address = || node.and_then(|node| with(&adapters, node.into()).into_iter().next().cloned());
        Ok(adapter.or_else(has_address))
    }

    fn keep(&self, adapter: &Adapter, keep_for: KeepFor) -> Result<(), Error> {
        self.routes.keep(adapter, keep_for).map_err(|problem| Error::Adapter { problem })
    }

    /// Prepares for a switch on the adapter: it takes over the addresses, and the system forgets routes.
    ///
    /// # Errors
    /// The adapter must not be used, or its routes cannot be kept.
    pub(crate) fn prepare(&self, choice: &Choice) -> Result<(), Error> {
        match (&choice.refused, &choice.adapter) {
            (Some(why), _) => Err(Error::Adapter { problem: why.clone() }),
            (None, None) => Ok(()),
            (None, Some(adapter)) => self.keep(adapter, KeepFor::Creation),
        }
    }
}

fn choose(adapters: &[Adapter], selector: Option<&AdapterSelector>, node: Option<Ipv4Addr>) -> Choice {
    let (fits, what): (Vec<&Adapter>, String) = match (selector, node) {
        (Some(AdapterSelector::Name(name)), _) => {
            let fits = adapters.iter().filter(|adapter| adapter.name.eq_ignore_ascii_case(name)).collect();
            (fits, format!("the name {name}"))
        }
        (Some(AdapterSelector::Mac(mac)), _) => {
            let fits = adapters.iter().filter(|adapter| adapter.mac == Some(mac.0)).collect();
            (fits, format!("the MAC address {mac}"))
        }
        (Some(AdapterSelector::Address(address)), _) => {
            (with(adapters, (*address).into()), format!("the address {address}"))
        }
        (None, Some(address)) => (with(adapters, address.into()), format!("the node's address {address}")),
        (None, None) => return Choice::refused(None, ADDRESS_UNKNOWN.to_owned()),
    };
    let name = match selector {
        Some(AdapterSelector::Name(name)) => Some(name.clone()),
        _ => None,
    };
    let physical: Vec<&Adapter> = fits.iter().copied().filter(|adapter| !is_virtual(&adapter.name)).collect();
    if let [adapter] = &physical[..]
        && can_be_used(adapter)
    {
        return Choice { name: Some(adapter.name.clone()), adapter: Some((*adapter).clone()), refused: None };
    }
    if let Some(choice) = behind_switch(adapters, selector, &fits) {
        return choice;
    }
    Choice::refused(name, why_not(adapters, &what, &physical, &fits))
}

fn can_be_used(adapter: &Adapter) -> bool {
    adapter.is_up && usable(adapter).next().is_some()
}

/// The adapter that a switch has already: of another network, of Docker, or left over. Then a further network uses the same
/// switch, and nothing is taken over. Windows need not list such a physical adapter, so a name or MAC address of the operator is
/// enough. An address leads to a switch only: it must be known to be that of a physical adapter.
fn behind_switch(
    adapters: &[Adapter],
    selector: Option<&AdapterSelector>,
    fits: &[&Adapter],
) -> Option<Choice> {
    let of_switch = || fits.iter().find_map(|adapter| switch(&adapter.name));
    let is_listed = |name: &&str| adapters.iter().any(|adapter| adapter.name.eq_ignore_ascii_case(name));
    let name = match selector {
        Some(AdapterSelector::Name(name)) => Some(name.as_str()),
        Some(AdapterSelector::Mac(_)) => of_switch(),
        Some(AdapterSelector::Address(_)) | None => of_switch().filter(is_listed),
    }?;
    let is_of_switch = |adapter: &&Adapter| {
        switch(&adapter.name).is_some_and(|switch| switch.eq_ignore_ascii_case(name)) && can_be_used(adapter)
    };
    let carrier = adapters.iter().find(is_of_switch)?;
    Some(Choice { name: Some(name.to_owned()), adapter: Some(carrier.clone()), refused: None })
}

fn why_not(adapters: &[Adapter], what: &str, physical: &[&Adapter], fits: &[&Adapter]) -> String {
    let known = || {
        let names: Vec<&str> =
            adapters.iter().map(|it| it.name.as_str()).filter(|name| !is_virtual(name)).collect();
        names.join(", ")
    };
    match (physical, fits) {
        ([adapter], _) if !adapter.is_up => format!("the adapter {} is down", adapter.name),
        ([adapter], _) => format!("the adapter {} has no IPv4 address of its network", adapter.name),
        ([], []) => format!("no adapter has {what}; the adapters are {}", known()),
        ([], [switched, ..]) => {
            let name = switch(&switched.name).unwrap_or(&switched.name);
            format!(
                "{what} is on {}, an adapter of another virtual switch; if the physical adapter of that is {name}, name it \
                 (--adapter {name:?}); Windows lists the physical adapters {}",
                switched.name,
                known()
            )
        }
        _ => format!("several adapters have {what}"),
    }
}

fn with(adapters: &[Adapter], address: IpAddr) -> Vec<&Adapter> {
    let has = |adapter: &&Adapter| adapter.addresses.iter().any(|own| own.addr() == address);
    adapters.iter().filter(has).collect()
}
