//! The pools of addresses that the first agent of a new cluster creates.

use ipnet::IpNet;
use serde_json::json;
use tortie_api::net::overlap;
use tortie_api::support::{Pool, is_for_load_balancers, is_terminating};
use tortie_api::{Key, Kind};
use tortie_deploy::{Encapsulation, POOL_NAME, POOL_V6_NAME};
use tortie_store::backoff::{Backoff, random_seed};
use tortie_store::{Endpoints, StoreError, Stored};

/// The pool that an agent creates if the datastore has none of its family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefaultPool {
    /// Its network.
    pub cidr: IpNet,
    /// Whether the node's address replaces that of pods when they talk to addresses outside of all pools.
    pub nat_outgoing: bool,
    /// How its packets travel between nodes.
    pub encapsulation: Encapsulation,
}

/// Creates the pool if there is none, and retries until the datastore has answered.
pub(crate) async fn ensure(store: &dyn Endpoints, pool: &DefaultPool) {
    let mut backoff = Backoff::new(random_seed());
    while let Err(error) = create(store, pool).await {
        tracing::warn!(%error, pool = %pool.cidr, "cannot create the default pool; Tortie retries");
        backoff.wait().await;
    }
}

/// What to do about the default pool.
#[derive(Debug, PartialEq, Eq)]
enum PoolDecision {
    /// A pool gives addresses of its family.
    Keep,
    /// A deleted pool with this name is still in use: no other one may have its addresses, or its name.
    Wait(String),
    Create,
}

fn decide(pools: &[Stored], pool: &DefaultPool, name: &str) -> PoolDecision {
    let is_of_family = |stored: &Stored| {
        let cidr = stored.value["spec"]["cidr"].as_str().and_then(|text| text.parse::<IpNet>().ok());
        // Nobody knows what a pool that cannot be read is for.
        cidr.is_none_or(|cidr| cidr.addr().is_ipv4() == pool.cidr.addr().is_ipv4())
    };
    let gives = |stored: &Stored| !is_for_load_balancers(&stored.value) && !is_terminating(&stored.value);
    if pools.iter().any(|stored| is_of_family(stored) && gives(stored)) {
        return PoolDecision::Keep;
    }
    let deleted = pools.iter().filter_map(|stored| Pool::of(&stored.key, &stored.value));
    let is_in_the_way = |other: &Pool| other.name == name || overlap(&other.cidr, &pool.cidr);
    match deleted.filter(|other| other.is_terminating).find(is_in_the_way) {
        Some(other) => PoolDecision::Wait(other.name),
        None => PoolDecision::Create,
    }
}

async fn create(store: &dyn Endpoints, pool: &DefaultPool) -> Result<(), StoreError> {
    let (name, block_size) = match pool.cidr {
        IpNet::V4(_) => (POOL_NAME, 26),
        IpNet::V6(_) => (POOL_V6_NAME, 122),
    };
    match decide(&store.list(Kind::IpPool).await?.items, pool, name) {
        PoolDecision::Keep => return Ok(()),
        PoolDecision::Wait(other) => {
            tracing::warn!(
                pool = %pool.cidr,
                "no default pool is created, because IPPool {other} was deleted and is still in use; create a pool, or restart an agent \
                 when it is gone"
            );
            return Ok(());
        }
        PoolDecision::Create => {}
    }
    let key = Key::global(Kind::IpPool, name);
    let spec = json!({
        "cidr": pool.cidr.to_string(), "vxlanMode": pool.encapsulation.vxlan_mode(), "ipipMode": "Never",
        "natOutgoing": pool.nat_outgoing, "blockSize": block_size, "nodeSelector": "all()",
    });
    let value = json!({
        "apiVersion": Kind::IpPool.api_version(), "kind": Kind::IpPool.name(),
        "metadata": {"name": name}, "spec": spec,
    });
    store.provide(&key, value).await?;
    tracing::info!(pool = %pool.cidr, "created the IPPool {name}, because there was none of its family");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tortie_store::{Embedded, Store};

    #[tokio::test]
    async fn a_pool_is_created_only_if_there_is_none() {
        let store = Embedded::in_memory().unwrap();
        let encapsulation = Encapsulation::None;
        let pool =
            |cidr: &str| DefaultPool { cidr: cidr.parse().unwrap(), nat_outgoing: true, encapsulation };
        ensure(&store, &pool("10.1.0.0/16")).await;
        ensure(&store, &pool("10.2.0.0/16")).await;
        let pools = store.list(Kind::IpPool).await.unwrap().items;
        assert_eq!(pools.len(), 1);
        assert_eq!(pools[0].value["spec"]["cidr"], "10.1.0.0/16");
        assert_eq!(pools[0].value["spec"]["vxlanMode"], "Never");
        ensure(&store, &pool("fd00:10::/56")).await;
        ensure(&store, &pool("fd00:11::/56")).await;
        let all = store.list(Kind::IpPool).await.unwrap().items;
        assert_eq!(all.len(), 2);
        assert_eq!(all[1].value["spec"]["cidr"], "fd00:10::/56");
        store.delete(&all[1].key, None).await.unwrap();
        store.delete(&pools[0].key, None).await.unwrap();

        let own = Key::global(Kind::IpPool, "own");
        store.create(&own, json!({"spec": {"cidr": "10.3.0.0/16", "vxlanMode": "Always"}})).await.unwrap();
        ensure(&store, &pool("10.2.0.0/16")).await;
        assert_eq!(store.list(Kind::IpPool).await.unwrap().items.len(), 1);

        // Pods get no addresses of Services.
        store.delete(&own, None).await.unwrap();
        let services = json!({"spec": {"cidr": "10.9.0.0/24", "allowedUses": ["LoadBalancer"]}});
        store.create(&Key::global(Kind::IpPool, "services"), services).await.unwrap();
        ensure(&store, &pool("10.2.0.0/16")).await;
        assert_eq!(store.list(Kind::IpPool).await.unwrap().items.len(), 2);
    }

    #[test]
    fn a_pool_is_created_beside_a_deleted_one_that_is_not_in_the_way() {
        for (name, cidr, expected) in [
            (POOL_NAME, "10.5.0.0/16", PoolDecision::Wait(POOL_NAME.to_owned())),
            ("old", "10.2.1.0/24", PoolDecision::Wait("old".to_owned())),
            ("old", "10.5.0.0/16", PoolDecision::Create),
        ] {
            let metadata = json!({"name": name, "deletionTimestamp": "2026-11-27T00:00:00Z"});
            let value = json!({"metadata": metadata, "spec": {"cidr": cidr, "vxlanMode": "Always"}});
            let deleted = Stored::new(Key::global(Kind::IpPool, name), value, tortie_store::Written::at(1));
            let cidr = "10.2.0.0/16".parse().unwrap();
            let pool = DefaultPool { cidr, nat_outgoing: true, encapsulation: Encapsulation::None };
            assert_eq!(decide(&[deleted], &pool, POOL_NAME), expected, "{name}");
        }
    }
}
