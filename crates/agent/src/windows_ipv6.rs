//! The IPv6 block of a Windows node whose network is of type L2Bridge. The dataplane makes the network with it.

use std::sync::Arc;

use ipnet::Ipv6Net;
use tortie_api::net::IpVersion;
use tortie_api::{Key, Kind, Resource};
use tortie_hcn::{Feature, Hcn, HcnExt as _};
use tortie_ipam::{Ipam, IpamError};
use tortie_store::Endpoints;
use tortie_windows::Host;

use crate::AgentError;

/// Claims the block, and tells the machine's network why there is none.
pub(crate) struct WindowsIpv6 {
    hcn: Arc<dyn Hcn>,
    host: Host,
}

impl WindowsIpv6 {
    pub(crate) fn new(hcn: Arc<dyn Hcn>, host: Host) -> Self {
        Self { hcn, host }
    }

    /// Claims a block if the Node as it is stored can have one now.
    pub(crate) async fn look_again(
        &self,
        store: &dyn Endpoints,
        node: &str,
        ipam: &Ipam,
    ) -> Result<(), AgentError> {
        let key = Key::global(Kind::Node, node);
        let Some(stored) = store.get(&key).await? else { return Ok(()) };
        let Ok(Resource::Node(known)) = Resource::read(&key, &stored.value) else { return Ok(()) };
        let own = known.own_address(IpVersion::V6).or(known.reported_address(IpVersion::V6));
        self.ensure_block(ipam, own.is_some()).await.map(drop)
    }

    /// The node's block, if HNS has IPv6 beside IPv4 and an IPv6 pool is for the node. IPv4 does not depend on it. A node without an
    /// IPv6 address gets none, because no other node would reach its pods.
    pub(crate) async fn ensure_block(
        &self,
        ipam: &Ipam,
        has_address: bool,
    ) -> Result<Option<Ipv6Net>, AgentError> {
        if !self.is_supported().await? {
            return Ok(None);
        }
        let known = ipam.ipv6_block().await?;
        let has_pool = ipam.has_ipv6_pool().await?;
        let (block, lack) = match known {
            Some(_) if has_address => (known, None),
            None if !has_pool => (None, None),
            // The pods that run keep their addresses.
            _ if !has_address => {
                let why = "the Node has no IPv6 address, by which other nodes reach them: let its kubelet report one, write the \
                           annotation projectcalico.org/IPv6Address, or exclude the node from the IPv6 pools (nodeSelector)";
                (known, Some(why.to_owned()))
            }
            _ => match ipam.ensure_ipv6_block().await {
                Ok(block) => (block, None),
                Err(error @ IpamError::Store(_)) => return Err(error.into()),
                Err(error) => (None, Some(format!("{error}; enlarge the IPv6 pool"))),
            },
        };
        self.host.set_ipv6_lack(lack);
        // The node keeps its block when its pool goes. New pods get none of its addresses then.
        self.host.set_ipv6_wanted(has_pool);
        Ok(block)
    }

    async fn is_supported(&self) -> Result<bool, AgentError> {
        let hcn = self.hcn.clone();
        let version = tokio::task::spawn_blocking(move || hcn.version()).await;
        let version = version.map_err(|error| AgentError::system("reading the version of HNS", error))?;
        // An HNS that does not answer now may have it. If not, it refuses the network with IPv6.
        Ok(version.map_or(true, |version| version.supports(Feature::Ipv6DualStack)))
    }
}
