//! The objects that Calico's programs expect in each cluster, with Calico's defaults. calicoctl ends with an error without
//! ClusterInformation (`version`, `ipam check`, `datastore migrate export`), and users change FelixConfiguration and the settings of IPAM
//! by `patch`, which changes only what exists.

use serde::Deserialize as _;
use serde_json::{Value, json};
use tortie_api::calico::{ClusterInformation, KubeControllersConfiguration};
use tortie_api::{Key, Kind};
use tortie_ipam::Config;
use tortie_store::backoff::{Backoff, random_seed};
use tortie_store::{Endpoints, StorageForm, StoreError, Stored};

use crate::host_endpoints::is_automatic;

/// Creates those that are missing, and retries until the datastore has answered. What an operator deletes later stays deleted until the
/// controllers start again. Calico's programs read etcd and the Kubernetes API only.
pub(crate) async fn ensure(store: &dyn Endpoints) {
    if store.storage_form() == StorageForm::AsGiven && !store.derives_from_kubernetes() {
        return;
    }
    let mut missing = objects();
    let mut backoff = Backoff::new(random_seed());
    loop {
        missing = create(store, missing).await;
        if missing.is_empty() {
            return;
        }
        backoff.wait().await;
    }
}

/// Creates objects, and returns those that must be tried again.
async fn create(store: &dyn Endpoints, missing: Vec<(Key, Value)>) -> Vec<(Key, Value)> {
    let mut failed = Vec::new();
    for (key, value) in missing {
        let created = match would_remove_endpoints(store, &key).await {
            Ok(true) => {
                tracing::warn!(
                    object = %key,
                    "the default object is not created, because it would remove the automatic host endpoints; create it with \
                     spec.controllers.node.hostEndpoint.autoCreate Enabled, or delete them"
                );
                continue;
            }
            Ok(false) => store.create(&key, value.clone()).await,
            Err(error) => Err(error),
        };
        match created {
            Ok(_) => tracing::info!(object = %key, "created the default object, because there was none"),
            // The cluster may have no such definition; agents report those that they need.
            Err(StoreError::AlreadyExists(_) | StoreError::KindAbsent(_)) => {}
            Err(error) => {
                tracing::warn!(%error, object = %key, "cannot create the default object; the controllers retry");
                failed.push((key, value));
            }
        }
    }
    failed
}

/// Whether a new object with the defaults would remove host endpoints: those that the controllers have created stay while nobody says what
/// nodes get.
async fn would_remove_endpoints(store: &dyn Endpoints, key: &Key) -> Result<bool, StoreError> {
    if key.kind != Kind::KubeControllersConfiguration {
        return Ok(false);
    }
    let endpoints = match store.list(Kind::HostEndpoint).await {
        Err(StoreError::KindAbsent(_)) => return Ok(false),
        listing => listing?.items,
    };
    if !endpoints.iter().any(|stored| is_automatic(&stored.value)) {
        return Ok(false);
    }
    Ok(!store.list(key.kind).await?.items.iter().any(|stored| stored.key == *key))
}

/// Whether a stored object has the content that the controllers give it when they create it.
#[must_use]
pub fn is_default(stored: &Stored) -> bool {
    let kind = stored.key.kind;
    if kind == Kind::IpamConfig {
        return Config::deserialize(&stored.value).is_ok_and(|config| config == Config::default());
    }
    let spec = |value: &Value| {
        let mut value = value.clone();
        StorageForm::Calico.fill(kind, &mut value);
        // Each cluster has its own.
        if let Some(Value::Object(spec)) = value.get_mut("spec") {
            spec.remove("clusterGUID");
        }
        value["spec"].clone()
    };
    objects().into_iter().any(|(key, value)| key == stored.key && spec(&value) == spec(&stored.value))
}

/// The objects (`node/pkg/lifecycle/startup/startup.go` and `kube-controllers/pkg/config/runconfig.go` of Calico). ClusterInformation names
/// no version of Calico: calicoctl refuses to work beside another one than its own.
fn objects() -> Vec<(Key, Value)> {
    let cluster = json!({
        "clusterGUID": uuid::Uuid::new_v4().simple().to_string(), "clusterType": "k8s", "datastoreReady": true,
    });
    // Calico's controllers start only those that have a section.
    let period = "5m0s";
    let controllers = json!({
        "controllers": {
            "node": {
                "hostEndpoint": {"autoCreate": "Disabled", "createDefaultHostEndpoint": "Enabled"},
                "leakGracePeriod": "15m0s", "reconcilerPeriod": period, "syncLabels": "Enabled",
            },
            "policy": {"reconcilerPeriod": period}, "workloadEndpoint": {"reconcilerPeriod": period},
            "serviceAccount": {"reconcilerPeriod": period}, "namespace": {"reconcilerPeriod": period},
            "loadBalancer": {"assignIPs": "AllServices"},
        },
        "etcdV3CompactionPeriod": "10m0s", "healthChecks": "Enabled", "logSeverityScreen": "Info",
        "prometheusMetricsPort": 9_094,
    });
    let resources = [
        (Kind::ClusterInformation, ClusterInformation::NAME, cluster),
        (Kind::FelixConfiguration, "default", json!({})),
        (Kind::KubeControllersConfiguration, KubeControllersConfiguration::NAME, controllers),
    ];
    let resources = resources.map(|(kind, name, spec)| {
        let metadata = json!({"name": name});
        let value =
            json!({"apiVersion": kind.api_version(), "kind": kind.name(), "metadata": metadata, "spec": spec});
        (Key::global(kind, name), value)
    });
    let ipam = json!({"strict_affinity": false, "auto_allocate_blocks": true});
    resources.into_iter().chain([(Key::global(Kind::IpamConfig, "default"), ipam)]).collect()
}

#[cfg(test)]
mod tests {
    use tortie_api::Resource;
    use tortie_store::{Embedded, Store};

    use super::*;

    #[tokio::test]
    async fn what_is_missing_is_created_and_nothing_else_changes() {
        let store = Embedded::in_memory().unwrap();
        let felix = Key::global(Kind::FelixConfiguration, "default");
        let own = json!({"metadata": {"name": "default"}, "spec": {"vxlanPort": 4790}});
        store.create(&felix, own.clone()).await.unwrap();
        assert_eq!(create(&store, objects()).await, []);
        assert_eq!(store.get(&felix).await.unwrap().unwrap().value, own);
        for (key, _) in objects() {
            let first = store.get(&key).await.unwrap().unwrap_or_else(|| panic!("{key} is missing"));
            if key.kind != Kind::IpamConfig {
                Resource::read(&key, &first.value).unwrap_or_else(|problems| panic!("{key}: {problems:?}"));
            }
            create(&store, objects()).await;
            assert_eq!(store.get(&key).await.unwrap().unwrap(), first, "once more");
        }
    }

    #[tokio::test]
    async fn automatic_host_endpoints_stay() {
        let store = Embedded::in_memory().unwrap();
        let endpoint = json!({"metadata": {"name": "e", "labels": {"projectcalico.org/created-by": "calico-kube-controllers"}}});
        let key = Key::global(Kind::HostEndpoint, "e");
        let stored = store.create(&key, endpoint).await.unwrap();
        let settings = Key::global(Kind::KubeControllersConfiguration, KubeControllersConfiguration::NAME);
        create(&store, objects()).await;
        assert_eq!(store.get(&settings).await.unwrap(), None);
        store.delete(&key, Some(&stored.version)).await.unwrap();
        create(&store, objects()).await;
        assert!(store.get(&settings).await.unwrap().is_some());
    }

    #[tokio::test]
    async fn a_store_of_tortie_alone_gets_none() {
        let store = Embedded::in_memory().unwrap();
        ensure(&store).await;
        assert_eq!(store.list(Kind::FelixConfiguration).await.unwrap().items, []);
    }
}
