//! `tortie install`.

use ipnet::Ipv4Net;

/// Reads the network of a pool.
pub(crate) fn pool(text: &str) -> Result<Ipv4Net, String> {
    let pool: Ipv4Net = text.parse().map_err(|_| {
        "it is no IPv4 network such as 10.244.0.0/16 (Tortie has no IPv6 pools yet)".to_owned()
    })?;
    tortie_deploy::check_pool(pool).map_err(|error| error.to_string())?;
    Ok(pool)
}
