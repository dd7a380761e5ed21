//! The cluster of an installation: its connection, and the paths of objects.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};
use serde_json::Value;
use tortie_store::kubernetes::{Kubernetes, ObjectError};

use crate::store::{Purpose, StoreArguments};

/// The owner of the fields that `tortie install` applies.
pub(crate) const MANAGER: &str = "tortie-install";

/// The cluster.
#[derive(clap::Args)]
pub(crate) struct ClusterArguments {
    /// The kubeconfig of the cluster, as --store kubernetes:FILE
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    #[command(flatten)]
    store: StoreArguments,
}

impl ClusterArguments {
    /// The datastore of the cluster.
    pub(crate) fn store(&self) -> anyhow::Result<StoreArguments> {
        match (&self.kubeconfig, self.store.given()) {
            (None, _) => Ok(self.store.clone()),
            (Some(_), Some(option @ ("store" | "config"))) => {
                bail!("--kubeconfig and --{option} both name a datastore; remove one of them")
            }
            (Some(file), _) => Ok(self.store.with_kubeconfig(file)),
        }
    }

    /// Opens the API of a cluster that this command changes.
    pub(crate) async fn open(&self) -> anyhow::Result<Arc<Kubernetes>> {
        const REMEDY: &str = "name the cluster with --kubeconfig FILE or --store kubernetes[:FILE]";
        let store = self.store()?;
        if store.lab().is_some() {
            bail!("the lab that runs on this machine has its own agents and takes no installation; {REMEDY}");
        }
        let opened = store.open_kubernetes(Purpose::Change).await?;
        opened.with_context(|| {
            format!("the datastore is no Kubernetes API, which this command changes; {REMEDY}")
        })
    }
}

/// The path of an object in the API.
pub(crate) fn path_of(object: &Value) -> anyhow::Result<String> {
    let text = |value: &Value| value.as_str().map(str::to_owned).context("an object lacks its kind or name");
    let (version, kind, name) =
        (text(&object["apiVersion"])?, text(&object["kind"])?, text(&object["metadata"]["name"])?);
    let plural = match kind.as_str() {
        "Namespace" => "namespaces",
        "ServiceAccount" => "serviceaccounts",
        "ConfigMap" => "configmaps",
        "ClusterRole" => "clusterroles",
        "ClusterRoleBinding" => "clusterrolebindings",
        "Role" => "roles",
        "RoleBinding" => "rolebindings",
        "Deployment" => "deployments",
        "CustomResourceDefinition" => "customresourcedefinitions",
        "DaemonSet" => "daemonsets",
        "ValidatingAdmissionPolicy" => "validatingadmissionpolicies",
        "ValidatingAdmissionPolicyBinding" => "validatingadmissionpolicybindings",
        "IPPool" => "ippools",
        "FelixConfiguration" => "felixconfigurations",
        kind => bail!("{kind} is not part of an installation"),
    };
    let root = if version.contains('/') { "apis" } else { "api" };
    Ok(match object["metadata"]["namespace"].as_str() {
        Some(namespace) => format!("/{root}/{version}/namespaces/{namespace}/{plural}/{name}"),
        None => format!("/{root}/{version}/{plural}/{name}"),
    })
}

/// Kind and name, for messages.
pub(crate) fn name_of(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    format!("{}/{}", text(&object["kind"]).to_lowercase(), text(&object["metadata"]["name"]))
}

/// An object, if it exists.
pub(crate) async fn get(cluster: &Kubernetes, path: &str) -> Result<Option<Value>, ObjectError> {
    match cluster.get_path(path).await {
        Ok(object) => Ok(Some(object)),
        Err(ObjectError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The objects of a list; none if the cluster does not have the kind.
pub(crate) async fn list(cluster: &Kubernetes, path: &str) -> Result<Vec<Value>, ObjectError> {
    let list = get(cluster, path).await?;
    Ok(list.and_then(|list| list["items"].as_array().cloned()).unwrap_or_default())
}

/// Whether the API server has the kind that limits what the agent of one node may write. Everybody may ask which kinds there are.
pub(crate) async fn has_admission_policies(cluster: &Kubernetes) -> Result<bool, ObjectError> {
    let kinds = get(cluster, "/apis/admissionregistration.k8s.io/v1").await?.unwrap_or_default();
    let mut kinds = kinds["resources"].as_array().into_iter().flatten();
    Ok(kinds.any(|kind| kind["kind"] == tortie_deploy::ADMISSION_POLICY))
}

/// Whether an object is of this kind, or binds one.
pub(crate) fn is_admission_policy(object: &Value) -> bool {
    object["kind"].as_str().is_some_and(|kind| kind.starts_with(tortie_deploy::ADMISSION_POLICY))
}

/// Whether `tortie install` applies this object.
pub(crate) fn is_managed(object: &Value) -> bool {
    let managers = object["metadata"]["managedFields"].as_array().into_iter().flatten();
    managers.into_iter().any(|one| one["manager"] == MANAGER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_object_of_an_installation_has_a_path() {
        let paths: Vec<String> = tortie_deploy::objects(&tortie_deploy::Values::default())
            .iter()
            .map(|object| path_of(object).unwrap())
            .collect();
        for expected in [
            "/api/v1/namespaces/tortie-system",
            "/api/v1/namespaces/tortie-system/configmaps/tortie-config",
            "/apis/apps/v1/namespaces/tortie-system/daemonsets/tortie-node",
            "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/tortie-node",
            "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/tortie-node",
            "/apis/rbac.authorization.k8s.io/v1/clusterroles/tortie-node",
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/nodereports.tortie.io",
        ] {
            assert!(paths.iter().any(|path| path == expected), "{expected}");
        }
    }
}
