//! The machine under an emulated HNS: adapters and routes in memory, and what a virtual switch does to them.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ipnet::{IpNet, Ipv4Net};
use tortie_hcn::{Adapter, IpHelper, IpHelperError, IpRoute};

/// The callbacks for changes.
type Watcher = Arc<dyn Fn() + Send + Sync>;

/// A machine in memory. Making the first network on an adapter moves its addresses to an adapter of the switch, and forgets its
/// routes, except for those that the system makes for its own addresses and the default route (docs/hns.md, Networks).
#[derive(Default)]
pub struct EmulatedHost {
    state: Mutex<HostState>,
    watchers: Mutex<Vec<Watcher>>,
}

/// The adapters and routes, and how the machine behaves.
#[derive(Debug, Clone, Default)]
pub struct HostState {
    /// The adapters.
    pub adapters: Vec<Adapter>,
    /// The routes.
    pub routes: Vec<IpRoute>,
    /// Whether the addresses come back only with [`EmulatedHost::settle`]. Until then, the switch's adapter has an address of
    /// 169.254.0.0/16.
    pub is_slow: bool,
    /// The adapters whose packets the machine forwards, and whether those of IPv6.
    pub forwarding: BTreeSet<(u32, bool)>,
    /// The number of routes that are refused next.
    pub refuses: usize,
    /// Whether nothing can be read.
    pub fails: bool,
    /// What [`EmulatedHost::settle`] brings back.
    unsettled: Option<(u32, Vec<IpNet>, Vec<IpRoute>)>,
}

impl EmulatedHost {
    /// A machine with these adapters and routes.
    pub fn new(adapters: Vec<Adapter>, routes: Vec<IpRoute>) -> EmulatedHost {
        let state = HostState { adapters, routes, ..HostState::default() };
        EmulatedHost { state: Mutex::new(state), watchers: Mutex::default() }
    }

    /// Changes the machine, and notifies.
    pub fn change<T>(&self, change: impl FnOnce(&mut HostState) -> T) -> T {
        let result = change(&mut self.state());
        let watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        watchers.iter().for_each(|watcher| watcher());
        result
    }

    /// Ends the time in which the switch's adapter has no address of its network.
    pub fn settle(&self) {
        self.change(|state| {
            let Some((index, addresses, routes)) = state.unsettled.take() else { return };
            if let Some(adapter) = state.adapters.iter_mut().find(|adapter| adapter.index == index) {
                adapter.addresses = addresses;
            }
            state.routes.extend(routes);
        });
    }

    /// A switch takes the adapter over: that of this name, or that with this address.
    pub(crate) fn take_over(&self, name: Option<&str>, provider: Ipv4Addr) {
        let taken = self.change(|state| state.take_over(name, provider));
        if taken && !self.state().is_slow {
            self.settle();
        }
    }

    /// The last network on an adapter has gone.
    pub(crate) fn give_back(&self, name: &str) {
        self.change(|state| state.give_back(name));
    }

    fn state(&self) -> MutexGuard<'_, HostState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn readable(&self) -> Result<MutexGuard<'_, HostState>, IpHelperError> {
        let state = self.state();
        let failure = IpHelperError { operation: "read", source: io::ErrorKind::Other.into() };
        if state.fails { Err(failure) } else { Ok(state) }
    }
}

impl HostState {
    /// The adapter of the system on the switch of a physical adapter.
    fn switched(&self, name: &str) -> Option<&Adapter> {
        self.adapters.iter().find(|adapter| adapter.name.eq_ignore_ascii_case(&switch_name(name)))
    }

    /// The addresses move to the physical adapter, and routes are forgotten as in [`take_over`](Self::take_over).
    fn give_back(&mut self, name: &str) {
        let Some(switched) = self.switched(name).cloned() else { return };
        let settled = self.unsettled.take().filter(|(index, ..)| *index == switched.index);
        let addresses = settled.map_or(switched.addresses, |(_, addresses, _)| addresses);
        self.adapters.retain(|adapter| adapter.index != switched.index);
        let is_physical = |adapter: &&mut Adapter| adapter.name.eq_ignore_ascii_case(name);
        let Some(physical) = self.adapters.iter_mut().find(is_physical) else { return };
        physical.addresses = addresses;
        let index = physical.index;
        self.routes.retain_mut(|route| {
            let stays = route.interface != switched.index || comes_back(route);
            if route.interface == switched.index {
                route.interface = index;
            }
            stays
        });
    }

    fn take_over(&mut self, name: Option<&str>, provider: Ipv4Addr) -> bool {
        // A further network uses the switch that is there.
        if name.is_some_and(|name| self.switched(name).is_some()) {
            return false;
        }
        let is_meant = |adapter: &&mut Adapter| match name {
            Some(name) => adapter.name.eq_ignore_ascii_case(name),
            None => adapter.addresses.iter().any(|own| own.addr() == IpAddr::V4(provider)),
        };
        let Some(adapter) = self.adapters.iter_mut().find(is_meant) else { return false };
        let addresses = std::mem::take(&mut adapter.addresses);
        let index = adapter.index + 100;
        let stopgap = Ipv4Net::new_assert(Ipv4Addr::new(169, 254, 77, 1), 16);
        let switched = Adapter {
            index,
            name: switch_name(&adapter.name),
            addresses: vec![stopgap.into()],
            ..adapter.clone()
        };
        let physical = adapter.index;
        let (of_adapter, others): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.routes).into_iter().partition(|route| route.interface == physical);
        self.routes = others;
        let back =
            of_adapter.into_iter().filter(comes_back).map(|route| IpRoute { interface: index, ..route });
        self.unsettled = Some((index, addresses, back.collect()));
        self.adapters.push(switched);
        true
    }
}

/// The name of the system's adapter on the switch of a physical one.
fn switch_name(physical: &str) -> String {
    format!("vEthernet ({physical})")
}

/// Whether the system makes the route again.
fn comes_back(route: &IpRoute) -> bool {
    route.is_own || route.destination.prefix_len() == 0
}

impl IpHelper for EmulatedHost {
    fn adapters(&self) -> Result<Vec<Adapter>, IpHelperError> {
        Ok(self.readable()?.adapters.clone())
    }

    fn routes(&self) -> Result<Vec<IpRoute>, IpHelperError> {
        Ok(self.readable()?.routes.clone())
    }

    fn add_route(&self, route: &IpRoute) -> Result<(), IpHelperError> {
        let mut state = self.readable()?;
        let failed =
            |kind: io::ErrorKind| Err(IpHelperError { operation: "add a route", source: kind.into() });
        if state.refuses > 0 {
            state.refuses -= 1;
            return failed(io::ErrorKind::PermissionDenied);
        }
        let Some(adapter) = state.adapters.iter().find(|adapter| adapter.index == route.interface) else {
            return failed(io::ErrorKind::NotFound);
        };
        let is_reached = route.next_hop.is_unspecified()
            || adapter.addresses.iter().any(|own| own.trunc().contains(&route.next_hop))
            || state.routes.iter().any(|other| {
                other.interface == route.interface
                    && other.next_hop.is_unspecified()
                    && other.destination.contains(&route.next_hop)
            });
        if !is_reached {
            return failed(io::ErrorKind::NetworkUnreachable);
        }
        if state.routes.contains(route) {
            return failed(io::ErrorKind::AlreadyExists);
        }
        state.routes.push(route.clone());
        Ok(())
    }

    fn delete_route(&self, route: &IpRoute) -> Result<(), IpHelperError> {
        self.readable()?.routes.retain(|known| known != route);
        Ok(())
    }

    fn enable_forwarding(&self, interface: u32, of_ipv6: bool) -> Result<(), IpHelperError> {
        self.readable()?.forwarding.insert((interface, of_ipv6));
        Ok(())
    }

    fn watch(&self, notify: Box<dyn Fn() + Send + Sync>) {
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner).push(notify.into());
    }
}
