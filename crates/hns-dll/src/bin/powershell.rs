//! A program in the place of Windows PowerShell, which Wine lacks: it sends the command to a test, by TCP, and prints the answer.
//!
//! The test's address is in `TORTIE_POWERSHELL_ADDRESS`. The answer is the exit code, a space, and the output.

use std::env;
use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::process::ExitCode;

/// The variable with the test's address.
const ADDRESS: &str = "TORTIE_POWERSHELL_ADDRESS";

fn main() -> ExitCode {
    let (code, output) = match ask() {
        Ok(answer) => answer,
        Err(error) => (1, format!("no answer of the test whose address is in {ADDRESS}: {error}")),
    };
    match io::stdout().write_all(output.as_bytes()) {
        Ok(()) => ExitCode::from(code),
        Err(_) => ExitCode::FAILURE,
    }
}

fn ask() -> io::Result<(u8, String)> {
    let mut arguments = env::args().skip_while(|argument| !argument.eq_ignore_ascii_case("-Command")).skip(1);
    let command = arguments.next().ok_or_else(|| io::Error::other("there is no -Command"))?;
    let address = env::var(ADDRESS).map_err(io::Error::other)?;
    let mut test = TcpStream::connect(address)?;
    test.write_all(command.as_bytes())?;
    test.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    test.read_to_string(&mut answer)?;
    let (code, output) = answer.split_once(' ').ok_or_else(|| io::Error::other("the answer has no code"))?;
    Ok((code.parse().map_err(io::Error::other)?, output.to_owned()))
}
