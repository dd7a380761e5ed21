//! The API as a trait, and typed calls on top of it.

use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tracing::debug;

use crate::schema::{Endpoint, LoadBalancer, Modify, Namespace, Network, Query, lenient};
use crate::{Class, Error, Failure, Guid, Version};

/// The kinds of objects that HNS keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// HostComputeNetwork.
    Network,
    /// HostComputeEndpoint.
    Endpoint,
    /// HostComputeNamespace.
    Namespace,
    /// HostComputeLoadBalancer.
    LoadBalancer,
    /// HostComputeRoute. Tortie makes none.
    SdnRoute,
    /// GuestNetworkService. Tortie makes none.
    GuestNetworkService,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Network => "network",
            Kind::Endpoint => "endpoint",
            Kind::Namespace => "namespace",
            Kind::LoadBalancer => "load balancer",
            Kind::SdnRoute => "route",
            Kind::GuestNetworkService => "guest network service",
        })
    }
}

/// One call. Documents are JSON text, as in the real API. Open and Close are not calls here: implementations of
/// [`Hcn`] manage handles.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Call {
    /// `HcnEnumerate…`: returns a JSON list of identifiers.
    Enumerate {
        /// The kind.
        kind: Kind,
        /// A [`Query`], or "".
        query: String,
    },
    /// `HcnCreate…`: returns the identifier as a JSON string.
    Create {
        /// The kind.
        kind: Kind,
        /// For an endpoint: its network, whose handle the real call takes. Otherwise zero.
        network: Guid,
        /// The identifier to use; zero lets HNS choose.
        id: Guid,
        /// The object's document.
        settings: String,
    },
    /// `HcnOpen…` and `HcnQuery…Properties`: returns the object's document.
    Query {
        /// The kind.
        kind: Kind,
        /// The identifier.
        id: Guid,
        /// A [`Query`], or "".
        query: String,
    },
    /// `HcnOpen…` and `HcnModify…`: returns nothing.
    Modify {
        /// The kind.
        kind: Kind,
        /// The identifier.
        id: Guid,
        /// A [`Modify`].
        settings: String,
    },
    /// `HcnDelete…`: returns nothing.
    Delete {
        /// The kind.
        kind: Kind,
        /// The identifier.
        id: Guid,
    },
    /// `HNSCall("POST", "/endpoints/ID/attach/")` of v1: attaches an endpoint to the node's own compartment (`HostAttach` of hcsshim).
    /// Returns nothing.
    AttachToHost {
        /// The endpoint's identifier.
        endpoint: Guid,
    },
    /// `HNSCall("GET", "/globals/version")` of v1: returns a [`Version`].
    Version,
    /// A call of an emulator that the real API does not have. Other implementations return `E_NOTIMPL`.
    Emulator {
        /// Its name.
        name: String,
        /// Its document.
        settings: String,
    },
}

impl Call {
    /// The name of the call in one word, for messages and counters.
    pub fn name(&self) -> &'static str {
        match self {
            Call::Enumerate { .. } => "enumerate",
            Call::Create { .. } => "create",
            Call::Query { .. } => "query",
            Call::Modify { .. } => "modify",
            Call::Delete { .. } => "delete",
            Call::AttachToHost { .. } => "attach to the host",
            Call::Version => "version",
            Call::Emulator { .. } => "emulator call",
        }
    }

    /// Whether the call only reads, so that it may be sent twice.
    pub fn is_read(&self) -> bool {
        matches!(self, Call::Enumerate { .. } | Call::Query { .. } | Call::Version)
    }

    /// The object of the call, for messages.
    fn object(&self) -> String {
        match self {
            Call::Enumerate { kind, query } => format!("{kind}s {query}"),
            Call::Create { kind, id, .. } | Call::Query { kind, id, .. } => format!("{kind} {id}"),
            Call::Modify { kind, id, .. } | Call::Delete { kind, id } => format!("{kind} {id}"),
            Call::AttachToHost { endpoint } => format!("{} {endpoint}", Kind::Endpoint),
            Call::Version => "HNS".to_owned(),
            Call::Emulator { name, .. } => name.clone(),
        }
    }
}

/// The Host Compute Network API. A call may take long, and several calls may run at once.
pub trait Hcn: Send + Sync {
    /// Makes one call and returns the output document, which is empty if the call has none.
    ///
    /// # Errors
    /// The error of the API: a code and an error record.
    fn call(&self, call: &Call) -> Result<String, Failure>;

    /// Calls `notify` whenever HNS has been restarted, or somebody has created or deleted a network. It is called from any
    /// thread, and must return soon. Implementations without notifications never call it.
    fn watch(&self, _notify: Box<dyn Fn() + Send>) {}
}

impl<T: Hcn + ?Sized> Hcn for std::sync::Arc<T> {
    fn call(&self, call: &Call) -> Result<String, Failure> {
        (**self).call(call)
    }

    fn watch(&self, notify: Box<dyn Fn() + Send>) {
        (**self).watch(notify);
    }
}

/// The calls with typed documents. All errors name the call and the object.
pub trait HcnExt: Hcn {
    /// The version of HNS.
    fn version(&self) -> Result<Version, Error> {
        read(self, &Call::Version)
    }

    /// The identifiers of the objects that a query selects.
    fn enumerate(&self, kind: Kind, query: &Query) -> Result<Vec<Guid>, Error> {
        read(self, &Call::Enumerate { kind, query: json(query) })
    }

    /// All networks.
    fn networks(&self) -> Result<Vec<Network>, Error> {
        list(self, Kind::Network, &Query::all())
    }

    /// The network of that name, in any case. If HNS ignores the filter and returns other networks, they are skipped.
    fn network_by_name(&self, name: &str) -> Result<Option<Network>, Error> {
        let networks: Vec<Network> = list(self, Kind::Network, &Query::filter("Name", name))?;
        Ok(networks.into_iter().find(|network| network.name.eq_ignore_ascii_case(name)))
    }

    /// One network.
    fn network(&self, id: Guid) -> Result<Network, Error> {
        get(self, Kind::Network, id)
    }

    /// Creates a network and returns its identifier.
    fn create_network(&self, network: &Network) -> Result<Guid, Error> {
        create(self, Kind::Network, Guid::ZERO, network.id, network)
    }

    /// Changes a network.
    fn modify_network(&self, id: Guid, request: &Modify) -> Result<(), Error> {
        modify(self, Kind::Network, id, request)
    }

    /// Deletes a network.
    fn delete_network(&self, id: Guid) -> Result<(), Error> {
        delete(self, Kind::Network, id)
    }

    /// The endpoints of a network, and of no other, even if HNS ignores the filter.
    fn endpoints_of_network(&self, network: Guid) -> Result<Vec<Endpoint>, Error> {
        // HNS accepts only the v1 name of the member here (docs/hns.md, Calls).
        let query = Query::filter("VirtualNetwork", &network.to_string());
        let mut endpoints: Vec<Endpoint> = list(self, Kind::Endpoint, &query)?;
        endpoints.retain(|endpoint| endpoint.host_compute_network == network);
        Ok(endpoints)
    }

    /// One endpoint.
    fn endpoint(&self, id: Guid) -> Result<Endpoint, Error> {
        get(self, Kind::Endpoint, id)
    }

    /// Creates an endpoint in the network that its document names, and returns its identifier.
    fn create_endpoint(&self, endpoint: &Endpoint) -> Result<Guid, Error> {
        create(self, Kind::Endpoint, endpoint.host_compute_network, endpoint.id, endpoint)
    }

    /// Changes an endpoint.
    fn modify_endpoint(&self, id: Guid, request: &Modify) -> Result<(), Error> {
        modify(self, Kind::Endpoint, id, request)
    }

    /// Deletes an endpoint.
    fn delete_endpoint(&self, id: Guid) -> Result<(), Error> {
        delete(self, Kind::Endpoint, id)
    }

    /// Attaches an endpoint to the node's own compartment. One that is attached there already stays so.
    fn attach_to_host(&self, endpoint: Guid) -> Result<(), Error> {
        let call = Call::AttachToHost { endpoint };
        match self.call(&call) {
            // The old interface has no codes. flannel looks for these words, too (`pkg/backend/hostgw/hostgw_windows.go`).
            Err(failure)
                if failure.code.class() == Class::AlreadyExists
                    || failure.record.contains("This endpoint is already attached to the switch.") =>
            {
                Ok(())
            }
            result => checked(&call, result).map(drop),
        }
    }

    /// One namespace.
    fn namespace(&self, id: Guid) -> Result<Namespace, Error> {
        get(self, Kind::Namespace, id)
    }

    /// Creates a namespace and returns its identifier.
    fn create_namespace(&self, namespace: &Namespace) -> Result<Guid, Error> {
        create(self, Kind::Namespace, Guid::ZERO, namespace.id, namespace)
    }

    /// Changes a namespace.
    fn modify_namespace(&self, id: Guid, request: &Modify) -> Result<(), Error> {
        modify(self, Kind::Namespace, id, request)
    }

    /// Deletes a namespace.
    fn delete_namespace(&self, id: Guid) -> Result<(), Error> {
        delete(self, Kind::Namespace, id)
    }

    /// One load balancer.
    fn load_balancer(&self, id: Guid) -> Result<LoadBalancer, Error> {
        get(self, Kind::LoadBalancer, id)
    }

    /// Creates a load balancer and returns its identifier.
    fn create_load_balancer(&self, balancer: &LoadBalancer) -> Result<Guid, Error> {
        create(self, Kind::LoadBalancer, Guid::ZERO, balancer.id, balancer)
    }

    /// Deletes a load balancer.
    fn delete_load_balancer(&self, id: Guid) -> Result<(), Error> {
        delete(self, Kind::LoadBalancer, id)
    }
}

impl<T: Hcn + ?Sized> HcnExt for T {}

fn list<H: Hcn + ?Sized, T: DeserializeOwned>(hcn: &H, kind: Kind, query: &Query) -> Result<Vec<T>, Error> {
    let ids = hcn.enumerate(kind, query)?;
    let mut objects = Vec::with_capacity(ids.len());
    for id in ids {
        match get(hcn, kind, id) {
            Ok(object) => objects.push(object),
            // It disappeared after the enumeration; the others still count.
            Err(error) if error.class() == Class::NotFound => debug!(%kind, %id, "vanished while listing"),
            Err(error) => return Err(error),
        }
    }
    Ok(objects)
}

fn get<H: Hcn + ?Sized, T: DeserializeOwned>(hcn: &H, kind: Kind, id: Guid) -> Result<T, Error> {
    read(hcn, &Call::Query { kind, id, query: json(&Query::all()) })
}

fn create<H: Hcn + ?Sized>(
    hcn: &H,
    kind: Kind,
    network: Guid,
    id: Guid,
    document: &impl Serialize,
) -> Result<Guid, Error> {
    read(hcn, &Call::Create { kind, network, id, settings: json(document) })
}

fn modify<H: Hcn + ?Sized>(hcn: &H, kind: Kind, id: Guid, request: &Modify) -> Result<(), Error> {
    send(hcn, &Call::Modify { kind, id, settings: json(request) }).map(drop)
}

fn delete<H: Hcn + ?Sized>(hcn: &H, kind: Kind, id: Guid) -> Result<(), Error> {
    send(hcn, &Call::Delete { kind, id }).map(drop)
}

fn send<H: Hcn + ?Sized>(hcn: &H, call: &Call) -> Result<String, Error> {
    checked(call, hcn.call(call))
}

fn checked(call: &Call, result: Result<String, Failure>) -> Result<String, Error> {
    result.map_err(|failure| {
        debug!(?call, %failure, "HNS refused a call");
        Error::Call { call: call.name(), object: call.object(), failure }
    })
}

fn read<H: Hcn + ?Sized, T: DeserializeOwned>(hcn: &H, call: &Call) -> Result<T, Error> {
    let answer = send(hcn, call)?;
    lenient(&answer).map_err(|error| Error::Answer { call: call.name(), object: call.object(), error })
}

/// The documents are plain data with text keys, so they always have a JSON form.
fn json(document: &impl Serialize) -> String {
    serde_json::to_string(document).unwrap_or_default()
}
