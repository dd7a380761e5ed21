//! Namespaces (hcsshim `hcn/hcnnamespace.go`).

use serde_json::json;
use tortie_hcn::schema::{
    Modify, Namespace, NamespaceEndpoint, NamespaceResource, RequestType, ResourceType,
};
use tortie_hcn::{Failure, Guid, HResult};

use crate::check::{document, fail};
use crate::config::Config;
use crate::endpoints::detached;
use crate::state::{ATTACHED_SHARING, NODE_COMPARTMENT, State};

impl State {
    pub(crate) fn create_namespace(
        &mut self,
        id: Guid,
        text: &str,
        config: &Config,
    ) -> Result<Guid, Failure> {
        let mut namespace: Namespace = document(text, config.strict)?;
        namespace.id = self.new_id(id, namespace.id)?;
        namespace.namespace_guid = namespace.id;
        namespace.resources.clear();
        if namespace.namespace_id == 0 {
            let highest = self.namespaces.values().map(|other| other.namespace_id).max();
            namespace.namespace_id = highest.unwrap_or_default().max(NODE_COMPARTMENT) + 1;
        }
        let id = namespace.id;
        self.namespaces.insert(id, namespace.into());
        Ok(id)
    }

    pub(crate) fn modify_namespace(&mut self, id: Guid, text: &str, config: &Config) -> Result<(), Failure> {
        let request: Modify = document(text, config.strict)?;
        self.namespace(id)?;
        if request.resource_type != ResourceType::Endpoint {
            let error = format!("ResourceType {} of a namespace is not emulated", request.resource_type);
            return fail(HResult::HCN_E_REQUEST_UNSUPPORTED, error);
        }
        let NamespaceEndpoint { endpoint_id, .. } = document(&request.settings.to_string(), config.strict)?;
        match request.request_type {
            RequestType::Add => self.attach(id, endpoint_id),
            RequestType::Remove => self.detach(id, endpoint_id),
            other => fail(HResult::HCN_E_REQUEST_UNSUPPORTED, format!("RequestType {other} for a namespace")),
        }
    }

    /// The endpoints in a deleted namespace are detached and stay.
    pub(crate) fn delete_namespace(&mut self, id: Guid) -> Result<(), Failure> {
        for endpoint in self.namespace(id)?.endpoints().collect::<Vec<_>>() {
            self.detach(id, endpoint)?;
        }
        self.namespaces.remove(&id);
        self.compartments.remove(&id);
        Ok(())
    }

    pub(crate) fn attach(&mut self, namespace: Guid, id: Guid) -> Result<(), Failure> {
        let endpoint = self.endpoint_mut(id)?;
        if endpoint.is_remote() {
            let error = format!("endpoint {id} is remote");
            return fail(HResult::HCN_E_INVALID_REMOTE_ENDPOINT_OPERATION, error);
        }
        if !endpoint.host_compute_namespace.is_zero() {
            let error = format!("endpoint {id} is in namespace {}", endpoint.host_compute_namespace);
            return fail(HResult::HCN_E_ENDPOINT_NAMESPACE_ALREADY_EXISTS, error);
        }
        endpoint.host_compute_namespace = namespace;
        endpoint.base.state = Some(ATTACHED_SHARING);
        let resource =
            NamespaceResource { r#type: "Endpoint".into(), data: json!({ "Id": id }), ..Default::default() };
        self.namespace_mut(namespace)?.resources.push(resource);
        Ok(())
    }

    pub(crate) fn detach(&mut self, namespace: Guid, id: Guid) -> Result<(), Failure> {
        let endpoint = self.endpoint_mut(id)?;
        if endpoint.host_compute_namespace != namespace {
            return fail(HResult::ERROR_NOT_FOUND, format!("endpoint {id} is not in namespace {namespace}"));
        }
        detached(endpoint);
        let id = json!(id);
        let namespace = self.namespace_mut(namespace)?;
        namespace.resources.retain(|resource| resource.data.get("Id") != Some(&id));
        Ok(())
    }
}
