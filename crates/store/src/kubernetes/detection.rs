//! Finds the group of the API in which Calico keeps its kinds.
//!
//! Calico 3.32 uses `projectcalico.org/v3` if only that group is served, and `crd.projectcalico.org/v1` otherwise
//! (`libcalico-go/lib/backend/k8s/discovery.go`): its own API server, too, serves the first one from the objects of the
//! second one. Tortie does the same, except where objects of the first group would be overlooked: that is an error.

use http::header::ACCEPT;
use http::{HeaderValue, Method};
use serde_json::Value;
use tortie_api::{Kind, Position};

use super::answer::Operation;
use super::client::{Kubernetes, request};
use super::group::CalicoGroup;
use super::objects::ObjectError;
use super::resources;
use crate::StoreError;

/// The kinds whose objects tell that a group is in use.
const TELLING: [Kind; 8] = [
    Kind::IpPool,
    Kind::IpamBlock,
    Kind::Tier,
    Kind::GlobalNetworkPolicy,
    Kind::NetworkPolicy,
    Kind::HostEndpoint,
    Kind::GlobalNetworkSet,
    Kind::FelixConfiguration,
];

/// Asks for the list of groups with what is known of them.
const DISCOVERY: HeaderValue = HeaderValue::from_static(
    "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,\
     application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,application/json",
);

/// What the list of groups says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Served {
    Neither,
    Only(CalicoGroup),
    Both,
}

/// The groups of Calico in the list of groups.
fn served(groups: &Value) -> Served {
    let has = |group: CalicoGroup| {
        let groups = groups["groups"].as_array();
        groups.is_some_and(|groups| groups.iter().any(|one| one["name"] == group.name()))
    };
    match (has(CalicoGroup::Crd), has(CalicoGroup::Native)) {
        (false, false) => Served::Neither,
        (true, false) => Served::Only(CalicoGroup::Crd),
        (false, true) => Served::Only(CalicoGroup::Native),
        (true, true) => Served::Both,
    }
}

/// Whether the resources of a group are Calico's CustomResourceDefinitions. Calico's API server, which serves the same
/// group from another datastore, has no blocks.
fn has_blocks(resources: &Value) -> bool {
    let resources = resources["resources"].as_array();
    resources.is_some_and(|all| all.iter().any(|one| one["name"] == Kind::IpamBlock.plural()))
}

/// Returns whether another API server is to serve the second group, and cannot be reached. The API server itself serves definitions, and always knows them.
fn is_unreachable(discovery: &Value) -> bool {
    let (name, version) = CalicoGroup::Native.api_version().split_once('/').unwrap_or_default();
    let groups = discovery["items"].as_array().into_iter().flatten();
    let versions = groups
        .filter(|group| group["metadata"]["name"] == name)
        .flat_map(|group| group["versions"].as_array().into_iter().flatten());
    let mut versions = versions.filter(|one| one["version"] == version);
    versions.next().is_some_and(|version| version["freshness"] == "Stale")
}

impl Kubernetes {
    /// The group for objects of this kind. For kinds of others, it has no meaning.
    ///
    /// # Errors
    /// The API server does not answer, or both groups may hold Calico's objects.
    pub(super) async fn group_of(&self, kind: Kind) -> Result<CalicoGroup, StoreError> {
        if resources::is_calico(kind) { self.group().await } else { Ok(CalicoGroup::Crd) }
    }

    /// The group in which Calico keeps its kinds. As long as neither is served, it is `crd.projectcalico.org/v1`.
    ///
    /// # Errors
    /// The API server does not answer, or both groups may hold Calico's objects.
    pub async fn group(&self) -> Result<CalicoGroup, StoreError> {
        if let Some(known) = self.calico_groups().known() {
            return Ok(known);
        }
        let found = match served(&self.read("/apis").await?) {
            Served::Neither => return Ok(CalicoGroup::Crd),
            Served::Only(CalicoGroup::Crd) => CalicoGroup::Crd,
            Served::Only(CalicoGroup::Native) if self.has_native_definitions().await? => CalicoGroup::Native,
            Served::Only(CalicoGroup::Native) => return Err(self.other_datastore()),
            Served::Both if !self.has_both_definitions().await? => CalicoGroup::Crd,
            Served::Both => match self.first_object(CalicoGroup::Native).await? {
                None => CalicoGroup::Crd,
                Some(kind) => return Err(self.ambiguous(kind).await?),
            },
        };
        tracing::info!(group = %found, "found the API group of Calico's kinds");
        self.calico_groups().set(Some(found));
        Ok(found)
    }

    /// Returns whether the second group is served from CustomResourceDefinitions.
    async fn has_native_definitions(&self) -> Result<bool, StoreError> {
        let path = format!("/apis/{}", CalicoGroup::Native);
        Ok(has_blocks(&self.read(&path).await?))
    }

    /// Answers the same question beside the definitions of the first group. The API server of Calico may not run any more, or its pods may have no network yet, which
    /// must not stop the nodes.
    async fn has_both_definitions(&self) -> Result<bool, StoreError> {
        match self.has_native_definitions().await {
            Err(error) => match is_unreachable(&self.discovery().await?) {
                true => Ok(false),
                false => Err(error),
            },
            has => has,
        }
    }

    /// The list of groups with their versions and resources, as far as the API server knows them (`Accept` with `as=APIGroupDiscoveryList`;
    /// Kubernetes 1.27). An older one answers with the plain list.
    async fn discovery(&self) -> Result<Value, StoreError> {
        let mut request = request(Method::GET, "/apis", Vec::new());
        request.headers_mut().insert(ACCEPT, DISCOVERY);
        self.send_path(request).await.map_err(|error| self.not_found_out(&error))
    }

    /// A kind of which the group has an object.
    async fn first_object(&self, group: CalicoGroup) -> Result<Option<Kind>, StoreError> {
        for kind in TELLING {
            let path = resources::path(group, kind, "").unwrap_or_default();
            let operation = Operation { verb: "list", kind, key: None, after: Position(0), group };
            let page = match self
                .call(&operation, request(Method::GET, &format!("{path}?limit=1"), Vec::new()))
                .await
            {
                Ok(page) => page,
                Err(StoreError::KindAbsent(_)) => continue,
                Err(error) => return Err(error),
            };
            if page["items"].as_array().is_some_and(|items| !items.is_empty()) {
                return Ok(Some(kind));
            }
        }
        Ok(None)
    }

    /// Both groups have definitions, and the one that Calico does not use has this kind of object.
    async fn ambiguous(&self, kind: Kind) -> Result<StoreError, StoreError> {
        let (crd, native) = (CalicoGroup::Crd, CalicoGroup::Native);
        let other = match self.first_object(crd).await? {
            Some(other) => format!("{crd} has {}", other.plural()),
            None => format!("Calico uses {crd} as long as it is defined, and it is empty"),
        };
        Ok(StoreError::Unavailable(format!(
            "{}: Calico's objects are in two API groups: {native} has {}, and {other}; delete the \
             CustomResourceDefinitions of the group that is not in use, or name the one in use with --calico-group",
            self.server(),
            kind.plural()
        )))
    }

    fn other_datastore(&self) -> StoreError {
        let native = CalicoGroup::Native;
        StoreError::Unavailable(format!(
            "{}: {native} is served without ipamblocks, so these are no CustomResourceDefinitions but an API server in \
             front of another datastore; use that one (--store etcd:URL), or install the definitions of {}",
            self.server(),
            CalicoGroup::Crd
        ))
    }

    /// A document about the API itself. Everybody who is authenticated may read it.
    async fn read(&self, path: &str) -> Result<Value, StoreError> {
        self.get_path(path).await.map_err(|error| self.not_found_out(&error))
    }

    fn not_found_out(&self, error: &ObjectError) -> StoreError {
        StoreError::Unavailable(format!(
            "{}: finding the API group of Calico's kinds: {error}",
            self.server()
        ))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_list_of_groups_tells_which_are_served() {
        let table = [
            (json!(["crd.projectcalico.org"]), Served::Only(CalicoGroup::Crd)),
            (json!(["projectcalico.org"]), Served::Only(CalicoGroup::Native)),
            (json!(["projectcalico.org", "crd.projectcalico.org"]), Served::Both),
            (json!(["operator.projectcalico.org"]), Served::Neither),
            (json!([]), Served::Neither),
        ];
        for (names, expected) in table {
            let groups: Vec<Value> =
                names.as_array().into_iter().flatten().map(|name| json!({"name": name})).collect();
            assert_eq!(served(&json!({"groups": groups})), expected, "{names}");
        }
        assert_eq!(served(&Value::Null), Served::Neither);
    }

    #[test]
    fn only_a_stale_version_is_unreachable() {
        let discovery = |group: &str, version: &str, freshness: &str| json!({"items": [{"metadata": {"name": group}, "versions": [{"version": version, "freshness": freshness}]}]});
        for (document, expected) in [
            (discovery("projectcalico.org", "v3", "Stale"), true),
            (discovery("projectcalico.org", "v3", "Current"), false),
            (discovery("projectcalico.org", "v4", "Stale"), false),
            (discovery("crd.projectcalico.org", "v3", "Stale"), false),
            (json!({"groups": [{"name": "projectcalico.org"}]}), false),
        ] {
            assert_eq!(is_unreachable(&document), expected, "{document}");
        }
    }

    #[test]
    fn an_api_server_of_calico_has_no_blocks() {
        for (names, expected) in
            [(vec!["tiers", "ipamblocks"], true), (vec!["tiers", "blockaffinities"], false)]
        {
            let resources: Vec<Value> = names.iter().map(|name| json!({"name": name})).collect();
            assert_eq!(has_blocks(&json!({"resources": resources})), expected, "{names:?}");
        }
        assert!(!has_blocks(&Value::Null));
    }
}
