//go:build windows

// Package hcsshim makes the module require hcsshim, whose tests of the package hcn run against the emulated HNS.
package hcsshim

import _ "github.com/Microsoft/hcsshim/hcn"
