//! A Windows node: an emulated HNS with its switch.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::Arc;

use crate::Stateful;
use anyhow::{Context, Result};
use ipnet::Ipv4Net;
use tortie_dataplane::{Delta, PodAddress, PodAttachment, PodWiring as _, Report};
use tortie_hcn::schema::{Acl, Namespace, SetPolicy};
use tortie_hcn::{Guid, Hcn, HcnExt};
use tortie_hns_emulator::{Config, Emulator, bind_compartment};
use tortie_kernel::interface_index;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::packet::PacketSocket;
use tortie_kernel::route::{Address, Change, RouteSocket};
use tortie_windows::{
    NETWORK, NetworkKind, NetworkSpec, PodNetwork, WindowsDataplane, WindowsWiring, ensure_network,
};

use super::services::{Balanced, Proxy};
use super::{End, Host, Location, VNI, path_of};
use crate::exceptions::no_acl_is_about_ports_of_sctp;

const INTERFACE: &str = "eth0";

pub(super) struct Node {
    hns: Arc<Emulator>,
    dataplane: Stateful<WindowsDataplane>,
    wiring: WindowsWiring,
    block: Ipv4Net,
    overlay: PodNetwork,
    /// By sandbox.
    compartments: BTreeMap<String, Guid>,
    proxy: Proxy,
}

impl Node {
    /// A node, and its end of the overlay.
    pub(super) fn new(namespace: &NetNs, block: Ipv4Net, config: Config) -> Result<(Self, PodNetwork)> {
        let hns = Arc::new(Emulator::with_switch(config, super::again(namespace)?)?);
        let hcn: Arc<dyn Hcn> = hns.clone();
        let spec = NetworkSpec {
            name: NETWORK.into(),
            block,
            ipv6: None,
            kind: NetworkKind::Overlay { vni: VNI },
            adapter: None,
        };
        let overlay = ensure_network(&*hns, &spec)?;
        let (wiring, dataplane) =
            (WindowsWiring::new(hcn.clone()), Stateful::new(WindowsDataplane::new(hcn)));
        let (compartments, proxy) = (BTreeMap::new(), Proxy::default());
        let node = Self { hns, dataplane, wiring, block, overlay: overlay.clone(), compartments, proxy };
        Ok((node, overlay))
    }
}

impl Host for Node {
    fn connect(&mut self, at: &Location, address: Ipv4Addr) -> Result<End> {
        let namespace = NetNs::create()?;
        let compartment = self.hns.create_namespace(&Namespace::default())?;
        bind_compartment(&*self.hns, compartment, Some(&path_of(&namespace)))?;
        self.compartments.insert(at.container_id.clone(), compartment);
        let interface = self.wiring.connect(&PodAttachment {
            endpoint: at.endpoint.clone(),
            container_id: at.container_id.clone(),
            netns: compartment.to_string(),
            addresses: vec![PodAddress::ipv4(address, self.block)],
            mtu: None,
            mac: None,
            limits: Default::default(),
            dns: Default::default(),
        })?;
        // Without its address, the pod's kernel has nothing to answer.
        let socket = namespace.run(|| -> Result<_> {
            let link = interface_index(INTERFACE)?;
            let address = Address { link, address: address.into(), prefix_length: 32 };
            RouteSocket::open()?.change(&Change::DeleteAddress(address))?;
            Ok(PacketSocket::open(link)?)
        })??;
        let router = self.overlay.router_mac.unwrap_or_else(|| panic!("the network is an overlay"));
        let end = End { socket, mac: interface.mac, router, _namespace: namespace };
        end.wait_until_live(address)?;
        Ok(end)
    }

    fn disconnect(&mut self, at: &Location) -> Result<()> {
        self.wiring.disconnect(&at.endpoint, &at.container_id)?;
        let compartment = self.compartments.remove(&at.container_id).context("it was never connected")?;
        Ok(self.hns.delete_namespace(compartment)?)
    }

    fn apply(&mut self, deltas: &[Delta]) -> Result<Report> {
        let report = self.dataplane.apply(deltas);
        no_acl_is_about_ports_of_sctp(&self.hns.endpoints_of_network(self.overlay.id)?)?;
        Ok(report)
    }

    fn balance(&mut self, services: &[Balanced], providers: &BTreeMap<Ipv4Addr, Ipv4Addr>) -> Result<()> {
        self.proxy.balance(&*self.hns, self.overlay.id, services, providers)
    }

    fn rules_that_name_sets(&self) -> Result<usize> {
        let network = self.hns.network(self.overlay.id)?;
        let sets = network.policies.iter().filter_map(|policy| policy.settings::<SetPolicy>().ok().flatten());
        let sets: BTreeSet<String> = sets.map(|set| set.id).collect();
        let names = |list: &str| list.split(',').any(|part| sets.contains(part));
        let endpoints = self.hns.endpoints_of_network(self.overlay.id)?;
        let policies = endpoints.iter().flat_map(|endpoint| &endpoint.policies);
        let acls = policies.filter_map(|policy| policy.settings::<Acl>().ok().flatten());
        Ok(acls.filter(|acl| names(&acl.local_addresses) || names(&acl.remote_addresses)).count())
    }
}
