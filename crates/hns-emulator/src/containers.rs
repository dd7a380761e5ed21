//! The running containers of the host compute service (HCS), as far as its old interface attaches endpoints to them
//! (`HcsModifyComputeSystem`, which hcsshim's `HotAttachEndpoint` calls; `attach` of a container by `HNSCall`).
//!
//! HNS makes the namespace of such a container when the first endpoint is attached. Later containers share it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Deserialize;
use serde_json::Value;
use tortie_hcn::schema::{Modify, Namespace, NamespaceType, RequestType, SchemaVersion};
use tortie_hcn::{Call, Failure, Guid, HResult, Hcn, HcnExt, Kind};

use crate::check::fail;
use crate::state::NODE_COMPARTMENT;

/// `HCS_E_SYSTEM_NOT_FOUND`, as `vmcompute.dll` returns it.
const SYSTEM_NOT_FOUND: HResult = HResult(0xC037_010E);

/// The running containers, with the namespaces that they got by an endpoint.
#[derive(Default)]
pub(crate) struct Containers(Mutex<BTreeMap<String, Option<Guid>>>);

/// The change of a container. `Settings` is the identifier of an endpoint.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ModifyContainer {
    resource_type: String,
    request_type: String,
    settings: Value,
}

impl Containers {
    pub(crate) fn start(&self, id: &str) {
        self.all().entry(id.to_owned()).or_default();
    }

    /// The container's endpoints are detached with it.
    pub(crate) fn stop(&self, hns: &dyn Hcn, id: &str) -> Result<(), Failure> {
        let namespace = self.namespace(id)?;
        self.all().remove(id);
        namespace.map_or(Ok(()), |namespace| self.delete_unused(hns, namespace))
    }

    /// The namespace of a running container, if it has one.
    pub(crate) fn namespace(&self, id: &str) -> Result<Option<Guid>, Failure> {
        match self.all().get(id) {
            Some(namespace) => Ok(*namespace),
            None => fail(SYSTEM_NOT_FOUND, format!("no container {id} is running")),
        }
    }

    /// The containers of a namespace.
    pub(crate) fn of(&self, namespace: Guid) -> Vec<String> {
        let all = self.all();
        let found = all.iter().filter(|(_, other)| **other == Some(namespace));
        found.map(|(id, _)| id.clone()).collect()
    }

    /// Changes a container, as its document says.
    pub(crate) fn modify(&self, hns: &dyn Hcn, id: &str, request: &str) -> Result<(), Failure> {
        self.namespace(id)?;
        let request: ModifyContainer = serde_json::from_str(request)
            .map_err(|error| Failure::new(HResult::HCN_E_INVALID_JSON, error.to_string()))?;
        let ModifyContainer { resource_type, request_type, settings } = request;
        let endpoint = settings.as_str().and_then(|endpoint| endpoint.parse().ok());
        match (resource_type.as_str(), request_type.as_str(), endpoint) {
            ("Network", "Add", Some(endpoint)) => self.attach(hns, id, endpoint),
            ("Network", "Remove", Some(endpoint)) => self.detach(hns, id, endpoint),
            _ => {
                let error = format!("{request_type} of {resource_type} {settings} is not emulated");
                fail(HResult::E_NOTIMPL, error)
            }
        }
    }

    pub(crate) fn attach(&self, hns: &dyn Hcn, id: &str, endpoint: Guid) -> Result<(), Failure> {
        let own = self.namespace(id)?;
        let others = namespace_of(hns, endpoint)?;
        let namespace = match (own, others) {
            // Another container has the endpoint, and this one shares its network.
            (None, Some(others)) if !self.of(others).is_empty() => others,
            (Some(own), Some(others)) if own == others => own,
            _ => attach_to(hns, own, endpoint)?,
        };
        self.all().insert(id.to_owned(), Some(namespace));
        Ok(())
    }

    pub(crate) fn detach(&self, hns: &dyn Hcn, id: &str, endpoint: Guid) -> Result<(), Failure> {
        let own = self.namespace(id)?;
        let Some(namespace) = own.filter(|own| namespace_of(hns, endpoint).is_ok_and(|of| of == Some(*own)))
        else {
            return fail(HResult::ERROR_NOT_FOUND, format!("endpoint {endpoint} is not in container {id}"));
        };
        if self.of(namespace).len() == 1 {
            let request = Modify::namespace_endpoint(RequestType::Remove, endpoint);
            hns.modify_namespace(namespace, &request).map_err(failure)?;
            if hns.namespace(namespace).map_err(failure)?.endpoints().next().is_some() {
                return Ok(());
            }
        }
        // The other containers keep it.
        self.all().insert(id.to_owned(), None);
        self.delete_unused(hns, namespace)
    }

    fn delete_unused(&self, hns: &dyn Hcn, namespace: Guid) -> Result<(), Failure> {
        if !self.of(namespace).is_empty() {
            return Ok(());
        }
        hns.call(&Call::Delete { kind: Kind::Namespace, id: namespace }).map(drop)
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Option<Guid>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) fn failure(error: tortie_hcn::Error) -> Failure {
    Failure::new(HResult::E_FAIL, error.to_string())
}

/// The namespace that has an endpoint.
pub(crate) fn namespace_of(hns: &dyn Hcn, endpoint: Guid) -> Result<Option<Guid>, Failure> {
    let text = hns.call(&Call::Query { kind: Kind::Endpoint, id: endpoint, query: String::new() })?;
    let document: Value =
        serde_json::from_str(&text).map_err(|error| Failure::new(HResult::E_FAIL, error.to_string()))?;
    let namespace = document["HostComputeNamespace"].as_str().and_then(|id| id.parse().ok());
    Ok(namespace.filter(|namespace: &Guid| !namespace.is_zero()))
}

/// Attaches an endpoint to a namespace, or else to a new one, and returns which.
pub(crate) fn attach_to(hns: &dyn Hcn, namespace: Option<Guid>, endpoint: Guid) -> Result<Guid, Failure> {
    let target = match namespace {
        Some(namespace) => namespace,
        None => {
            let mut new = Namespace { r#type: NamespaceType::HostDefault, ..Namespace::default() };
            new.base.schema_version = Some(SchemaVersion::V2);
            hns.create_namespace(&new).map_err(failure)?
        }
    };
    let request = Modify::namespace_endpoint(RequestType::Add, endpoint);
    if let Err(error) = hns.modify_namespace(target, &request) {
        if namespace.is_none() {
            hns.delete_namespace(target).map_err(failure)?;
        }
        return Err(failure(error));
    }
    Ok(target)
}

/// Attaches an endpoint to the node's own compartment, whose namespace is made for the first one.
pub(crate) fn attach_to_node(hns: &dyn Hcn, endpoint: Guid) -> Result<(), Failure> {
    if namespace_of(hns, endpoint)?.is_some() {
        // flannel looks for these words (`pkg/backend/hostgw/hostgw_windows.go`).
        let error = "This endpoint is already attached to the switch.";
        return fail(HResult::HCN_E_ENDPOINT_ALREADY_ATTACHED, error);
    }
    let listed = hns.call(&Call::Enumerate { kind: Kind::Namespace, query: String::new() })?;
    let listed: Vec<Guid> =
        serde_json::from_str(&listed).map_err(|error| Failure::new(HResult::E_FAIL, error.to_string()))?;
    let is_of_node = |id: &Guid| hns.namespace(*id).is_ok_and(|it| it.namespace_id == NODE_COMPARTMENT);
    let namespace = match listed.into_iter().find(is_of_node) {
        Some(namespace) => namespace,
        None => {
            let r#type = NamespaceType::HostDefault;
            let mut new = Namespace { r#type, namespace_id: NODE_COMPARTMENT, ..Namespace::default() };
            new.base.schema_version = Some(SchemaVersion::V2);
            hns.create_namespace(&new).map_err(failure)?
        }
    };
    attach_to(hns, Some(namespace), endpoint).map(drop)
}
