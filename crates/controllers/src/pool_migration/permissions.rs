//! What whoever carries out a migration must be allowed to do.

use std::collections::BTreeMap;

use tortie_api::Kind;
use tortie_store::Permission;

use super::observed::MigrationRequest;

/// The kinds that are looked at as a whole.
const LISTED: [Kind; 10] = [
    Kind::BgpConfiguration,
    Kind::BlockAffinity,
    Kind::IpPool,
    Kind::IpReservation,
    Kind::IpamBlock,
    Kind::IpamHandle,
    Kind::Namespace,
    Kind::Node,
    Kind::Pod,
    Kind::Service,
];
/// The kinds of which single objects are read.
const READ: [Kind; 6] =
    [Kind::BlockAffinity, Kind::IpPool, Kind::IpamBlock, Kind::IpamConfig, Kind::IpamHandle, Kind::Node];
/// The kinds of which objects are changed.
const CHANGED: [Kind; 5] = [Kind::BlockAffinity, Kind::IpPool, Kind::IpamBlock, Kind::IpamHandle, Kind::Node];
/// The kinds of which objects are deleted.
const DELETED: [Kind; 4] = [Kind::BlockAffinity, Kind::IpPool, Kind::IpamBlock, Kind::IpamHandle];

/// The permissions that the steps need.
pub(super) fn needed(request: &MigrationRequest) -> Vec<Permission> {
    let of = |verb: &'static str, kinds: &[Kind]| -> Vec<Permission> {
        kinds.iter().map(|kind| Permission { kind: *kind, subresource: None, verb }).collect()
    };
    let mut needed =
        [of("list", &LISTED), of("get", &READ), of("update", &CHANGED), of("delete", &DELETED)].concat();
    if request.planned.is_some() {
        needed.extend(of("create", &[Kind::IpPool]));
    }
    needed.push(Permission { kind: Kind::Pod, subresource: Some("eviction"), verb: "create" });
    needed
}

/// What is wrong without these permissions; `None` if none is missing.
pub(super) fn problem(missing: &[Permission]) -> Option<String> {
    let mut by_verb = BTreeMap::<&str, Vec<String>>::new();
    for Permission { kind, subresource, verb } in missing {
        let resource = match subresource {
            Some(subresource) => format!("{}/{subresource}", kind.plural()),
            None => kind.plural().to_owned(),
        };
        by_verb.entry(verb).or_default().push(resource);
    }
    let parts: Vec<String> =
        by_verb.into_iter().map(|(verb, resources)| format!("{verb} {}", resources.join(", "))).collect();
    (!parts.is_empty()).then(|| {
        format!(
            "this user must not {}; bind the ClusterRoles tortie-operator and tortie-pool-migration (\"Move to another pool\" in \
             docs/operate.md) to it. Nothing was changed",
            parts.join("; must not ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_verb_and_resource() {
        assert_eq!(problem(&[]), None);
        let permission = |verb, kind, subresource| Permission { kind, subresource, verb };
        let missing = [
            permission("update", Kind::Node, None),
            permission("create", Kind::Pod, Some("eviction")),
            permission("update", Kind::IpPool, None),
        ];
        let problem = problem(&missing).unwrap();
        assert!(
            problem
                .starts_with("this user must not create pods/eviction; must not update nodes, ippools; bind"),
            "{problem}"
        );
    }

    #[test]
    fn the_right_to_create_pools_is_needed_for_a_new_one_only() {
        let create = Permission { kind: Kind::IpPool, subresource: None, verb: "create" };
        let mut request = MigrationRequest::default();
        assert!(!needed(&request).contains(&create));
        request.planned = Some(serde_json::json!({}));
        assert!(needed(&request).contains(&create));
    }
}
