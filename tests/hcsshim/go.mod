module tortie.io/tests/hcsshim

go 1.26.8

require github.com/Microsoft/hcsshim v0.15.0
