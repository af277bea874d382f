"""`zerotune advise`: advice as tables, a picture and JSON; measurements that replace its assumptions."""
